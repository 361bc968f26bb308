"""Entries of an index, the `corral:` extension, and the list of galleries."""

from __future__ import annotations

import msgspec
import pytest

from corral.contract.manifest import LOCALAI, Continues, Manifest, Needs, Ready
from corral.contract.sources import TextFile
from corral.gallery.backends.entries import BackendIndex, read_index
from corral.gallery.galleries import BUILT_IN, DEFAULT_GALLERIES, Gallery, parse_galleries, write_galleries
from corral.kit.errors import Invalid

G = Gallery("g", "https://example.com/index.yaml")


def read(text: str, gallery: Gallery = G) -> BackendIndex:
    return read_index(gallery, text.encode())


def problems(text: str, gallery: Gallery = G) -> list[str]:
    return [str(problem) for problem in read(text, gallery).problems]


INDEX = """
- &llama
  name: llama-cpp
  alias: llama-cpp
  license: mit
  icon: https://example.com/i.png
  description: |
    two
    lines
  urls: [https://example.com]
  tags: [LLM, CPU]
  size: 3GB
  capabilities: {default: cpu-llama-cpp, nvidia: cuda12-llama-cpp}
- !!merge <<: *llama
  name: cpu-llama-cpp
  uri: quay.io/go-skynet/local-ai-backends:latest-cpu-llama-cpp
  mirrors: ["localai/localai-backends:latest-cpu-llama-cpp"]
  version: 1.10
- !!merge <<: *llama
  name: llama-cpp-development
- name: archive
  uri: https://example.com/a.tar.gz
  sha256: AAAABBBBCCCCDDDDAAAABBBBCCCCDDDDAAAABBBBCCCCDDDDAAAABBBBCCCCDDDD
"""


def test_fields_of_an_entry() -> None:
    index = read(INDEX)
    assert not index.problems
    meta, build, development, archive = index.entries
    assert meta.id == "g@llama-cpp"
    assert meta.is_meta
    assert dict(meta.capabilities) == {"default": "cpu-llama-cpp", "nvidia": "cuda12-llama-cpp"}
    assert (meta.description, meta.tags, meta.urls) == ("two\nlines\n", ("LLM", "CPU"), ("https://example.com",))
    assert (meta.license, meta.icon, meta.size) == ("mit", "https://example.com/i.png", "3GB")
    # The map alone does not make an entry a meta: builds inherit it from their anchor.
    assert not build.is_meta
    assert build.capabilities == meta.capabilities
    assert build.version == "1.10"
    assert build.mirrors == ("localai/localai-backends:latest-cpu-llama-cpp",)
    assert build.manifest is None
    assert development.is_meta
    assert development.is_development()
    assert not development.is_development("nightly")
    assert archive.sha256 == "aaaabbbbccccdddd" * 4


def test_the_extension() -> None:
    (entry,) = read(
        """
- name: engine
  uri: pypi://engine
  corral:
    protocol: openai
    command: [python, serve.py, --port, "{port}"]
    env: {THREADS: 4}
    ready: {path: /ok, timeout_s: 2.5}
    slots: 8
    devices: one
    continues: {chat: prefill}
    platforms: [linux/amd64]
    files: {serve.py: "print()", sub/x.txt: y}
    from_the_future: {a: b}
"""
    ).entries
    assert entry.manifest == Manifest(
        "openai",
        ("python", "serve.py", "--port", "{port}"),
        {"THREADS": "4"},
        Ready("/ok", 2.5),
        8,
        "one",
        continues=Continues(chat="prefill"),
    )
    assert entry.platforms == ("linux/amd64",)
    assert entry.files == (TextFile("serve.py", "print()"), TextFile("sub/x.txt", "y"))


def test_libraries_of_the_system_that_a_build_needs() -> None:
    libraries = "{libraries: [libgomp.so.1, libstdc++.so.6], debian: [libgomp1, libstdc++6]}"
    ours, localai, plain = read(
        f"""
- {{name: ours, uri: "pypi://x", corral: {{protocol: openai, command: [serve], needs: {libraries}}}}}
- {{name: localai, uri: "oci://quay.io/x/y", corral: {{needs: {libraries}}}}}
- {{name: plain, uri: "oci://quay.io/x/z", corral: {{platforms: [linux/amd64]}}}}
"""
    ).entries
    needs = Needs(("libgomp.so.1", "libstdc++.so.6"), ("libgomp1", "libstdc++6"))
    assert ours.manifest == Manifest("openai", ("serve",), needs=needs)
    assert localai.manifest == msgspec.structs.replace(LOCALAI, needs=needs), "still run as LocalAI's are"
    assert plain.manifest is None


@pytest.mark.parametrize(
    ("entry", "word"),
    [
        ("uri: https://example.com/a.tar", "has no name"),
        ("name: a", "neither a uri nor capabilities"),
        ("name: ../a\n  uri: https://example.com/a.tar", "a folder name"),
        ("name: a/b\n  uri: https://example.com/a.tar", "a folder name"),
        ("name: a@b\n  uri: https://example.com/a.tar", "a folder name"),
        ("name: .hidden\n  uri: https://example.com/a.tar", "a folder name"),
        ("name: a\n  alias: ../x\n  uri: https://example.com/a.tar", "alias"),
        ("name: a\n  uri: just-text", "not a source"),
        ("name: a\n  uri: ollama://x", "names a model"),
        ("name: a\n  uri: builtin://mock", "only allowed in the built-in gallery"),
        ("name: a\n  uri: file:///etc/x.tar", "path on the machine"),
        ("name: a\n  uri: /etc", "path on the machine"),
        ("name: a\n  uri: https://example.com/a.tar\n  sha256: abc", "64 hexadecimal"),
        ("name: a\n  uri: https://example.com/a.tar\n  tags: LLM", "tags"),
        ("name: a\n  uri: https://example.com/a.tar\n  capabilities: [x]", "capabilities"),
        ("name: a\n  uri: https://example.com/a.tar\n  corral: {protocol: soap}", "protocol"),
        ("name: a\n  uri: https://example.com/a.tar\n  corral: {protocol: openai}", "command"),
        ("name: a\n  uri: https://example.com/a.tar\n  corral: {protocol: grpc, slots: many}", "slots"),
        ("name: a\n  uri: https://example.com/a.tar\n  corral: {protocol: grpc, slots: 0}", "slots"),
        ("name: a\n  uri: https://example.com/a.tar\n  corral: {protocol: grpc, platforms: [linux]}", "platform"),
        ("name: a\n  uri: https://example.com/a.tar\n  corral: {files: {../x: y}}", "outside"),
        ("name: a\n  uri: https://example.com/a.tar\n  corral: {protocol: grpc, continues: {chat: prefill}}", "openai"),
        ("name: a\n  uri: https://example.com/a.tar\n  corral: {needs: {libraries: libx.so.1}}", "libraries"),
        ("name: a\n  uri: https://example.com/a.tar\n  corral: {needs: {libraries: [/lib/x.so.1]}}", "of a library"),
        ("name: a\n  uri: https://example.com/a.tar\n  corral: {needs: {libraries: [x1]}}", "of a library"),
        ("name: a\n  uri: https://example.com/a.tar\n  corral: {needs: {debian: [--reinstall]}}", "Debian package"),
        ("name: a\n  uri: https://example.com/a.tar\n  corral: {needs: {debian: [./x.deb]}}", "Debian package"),
        ("name: a\n  uri: https://example.com/a.tar\n  corral: {needs: {debian: [x=1]}}", "Debian package"),
    ],
)
def test_a_bad_entry_is_skipped_with_its_reason(entry: str, word: str) -> None:
    index = read(
        f"- name: first\n  uri: https://example.com/1.tar\n- {entry}\n- name: last\n  uri: https://example.com/2\n"
    )
    assert [each.name for each in index.entries] == ["first", "last"]
    (problem,) = index.problems
    assert problem.line == 3
    assert word in problem.reason


def test_only_links_can_be_clicked() -> None:
    (entry,) = read(
        "- {name: a, uri: https://example.com/a.tar, icon: 'javascript:alert(1)', urls: ['data:x', https://example.com]}"
    ).entries
    assert (entry.icon, entry.urls) == ("", ("https://example.com",))


def test_of_two_entries_of_one_name_the_first_counts() -> None:
    index = read("- {name: A, uri: https://example.com/1}\n- {name: a, uri: https://example.com/2}\n")
    assert [entry.uri for entry in index.entries] == ["https://example.com/1"]
    assert "'a' (line 2): an earlier entry has the same name; this one is ignored" in str(index.problems[0])


def test_a_mirror_nobody_can_read_costs_the_mirror_only() -> None:
    index = read("- {name: a, uri: https://example.com/1, mirrors: [nonsense, https://example.com/2]}")
    assert index.entries[0].mirrors == ("https://example.com/2",)
    assert "mirror is ignored" in index.problems[0].reason


def test_a_gallery_that_is_a_file_may_name_files() -> None:
    local = Gallery("g", "file:///srv/index.yaml")
    assert [e.uri for e in read("- {name: a, uri: /srv/a}\n- {name: b, uri: file:///srv/b.tar}", local).entries] == [
        "/srv/a",
        "file:///srv/b.tar",
    ]


def test_the_contracts_default() -> None:
    (gallery,) = parse_galleries(DEFAULT_GALLERIES)
    assert gallery.name == "localai"
    assert gallery.candidates[1] == "github:mudler/LocalAI/backend/index.yaml@master"


def test_galleries_as_the_setting_has_them() -> None:
    galleries = parse_galleries(
        '[{"name":"a","url":"https://a","mirrors":[" https://a ","","https://b"],'
        '"verification":{"issuer":"i","identity_regex":"^x","not_before":"2026-01-01T00:00:00Z"},"unknown":1}]'
    )
    assert galleries[0].candidates == ("https://a", "https://b")
    assert galleries[0].verification is not None
    assert galleries[0].verification.requires_signature
    assert parse_galleries("") == parse_galleries("null") == parse_galleries("[]") == ()
    assert parse_galleries(write_galleries((BUILT_IN, *galleries))) == galleries


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("{", "JSON"),
        ('{"name":"a"}', "JSON list"),
        ('[{"name":"","url":"https://a"}]', "name"),
        ('[{"name":"a@b","url":"https://a"}]', "name"),
        ('[{"name":"a","url":" "}]', "url"),
        ('[{"name":"a","url":"x"},{"name":"A","url":"y"}]', "two galleries"),
        ('[{"name":"corral","url":"x"}]', "two galleries"),
        ('[{"name":"a","url":"x","verification":{"identity_regex":"("}}]', "identity_regex"),
        ('[{"name":"a","url":"x","verification":{"not_before":"soon"}}]', "not_before"),
        ('[{"name":"a","url":"x","verification":{"not_before":"2026-01-01T00:00:00"}}]', "time zone"),
    ],
)
def test_galleries_that_will_not_do(text: str, word: str) -> None:
    with pytest.raises(Invalid, match=word):
        parse_galleries(text)
