"""Galleries of models: found by name, with base documents and variants; nobody is sent into our own network."""

from __future__ import annotations

from pathlib import Path

import pytest

from corral.gallery.galleries import Gallery
from corral.gallery.index_fetcher import IndexFetcher
from corral.gallery.models.library import Fetchers, ModelLibrary, refuse_private
from corral.gallery.models.variants import FleetMachine
from corral.kit.clock import SystemClock
from corral.kit.errors import Invalid, NotFound, Unavailable, Unreachable
from tests.support.model_catalogue import FakeDocuments, model_library

INDEX = """
- name: SmolLM2-135M
  config_file: {backend: other}
- name: org/big
  url: https://a.test/base.yaml
  overrides: {parameters: {model: big.gguf}}
  variants: [{model: org/huge}, {model: gone}]
- name: org/huge
  size: 100GB
  config_file: {backend: llama-cpp, f16: true}
"""
BASE = "config_file: |\n  backend: llama-cpp\n  context_size: 512\n"


async def test_what_is_built_in_wins_and_waits_for_nobody() -> None:
    documents = FakeDocuments({})
    library = ModelLibrary(
        [Gallery("a", "https://a.test/index.yaml")],
        Fetchers(documents.fetch, documents.fetch, documents.fetch),
        clock=SystemClock(),
    )
    assert (await library.find("smollm2-135M")).id == "corral@smollm2-135m"
    assert documents.requests == []
    with pytest.raises(
        NotFound, match=r"^no gallery has a model 'big'\nthe gallery a could not be read: there is no https://a.test"
    ):
        await library.find("big")
    with pytest.raises(Unavailable):
        await library.find("a@big")


async def test_names_are_found_in_any_case_and_in_the_gallery_that_is_named() -> None:
    library = model_library({"a": INDEX})
    assert (await library.find("A@smollm2-135m")).config_file == {"backend": "other"}
    assert (await library.find("Org/Big")).id == "a@org/big"
    assert (await library.find("org__big")).id == "a@org/big"
    with pytest.raises(NotFound, match="there are corral, a"):
        await library.find("b@big")
    entries = await library.entries()
    assert [entry.gallery.name for entry in entries if entry.name.lower() == "smollm2-135m"] == ["corral", "a"]
    assert len([entry for entry in entries if entry.gallery.name == "a"]) == 3


async def test_a_base_document_is_fetched_once() -> None:
    documents = FakeDocuments({"https://a.test/index.yaml": INDEX, "https://a.test/base.yaml": BASE})
    library = ModelLibrary(
        [Gallery("a", "https://a.test/index.yaml")],
        Fetchers(documents.fetch, documents.fetch, documents.fetch),
        clock=SystemClock(),
    )
    big = await library.find("org/big")
    for _ in range(2):
        found = await library.define(big)
        assert (found.name, found.backend, found.context_size, found.weights) == (
            "org/big",
            "llama-cpp",
            512,
            "big.gguf",
        )
    assert documents.requests.count("https://a.test/base.yaml") == 1
    library.invalidate()
    await library.define(await library.find("org/big"))
    assert documents.requests.count("https://a.test/base.yaml") == 2


async def test_a_fault_in_a_base_document_names_the_entry_and_the_document() -> None:
    base = "config_file: |\n  backend: [llama-cpp\n"
    library = model_library({"a": INDEX}, {"https://a.test/base.yaml": base})
    with pytest.raises(Invalid, match=r"^a@org/big: its base document https://a.test/base.yaml: .*YAML"):
        await library.define(await library.find("org/big"))


async def test_a_variant_goes_by_the_name_that_was_asked_for() -> None:
    library = model_library({"a": INDEX}, {"https://a.test/base.yaml": BASE})
    big = await library.find("org/big")
    large = [FleetMachine("default", 1 << 40)]
    assert (await library.define(big, large)).whole == {"name": "org/big", "backend": "llama-cpp", "f16": True}
    assert "f16" not in (await library.define(big, large, variant="org/big")).whole
    assert "f16" not in (await library.define(big, [FleetMachine("default", 1 << 30)])).whole
    assert (await library.define(big, variant="ORG/huge", name="mine")).name == "mine"
    with pytest.raises(NotFound, match="has no variant 'gone'"):
        await library.define(big, variant="gone")


@pytest.mark.parametrize(
    ("gallery", "url", "used"),
    [
        ("https://a.test/index.yaml", "https://a.test/base.yaml", "beside"),
        ("http://10.0.0.7/index.yaml", "http://10.0.0.7:81/base.yaml", "beside"),
        ("https://a.test/index.yaml", "http://169.254.169.254/latest", "elsewhere"),
        ("https://a.test/index.yaml", "github:mudler/LocalAI/gallery/virtual.yaml@master", "elsewhere"),
        ("github:mudler/LocalAI/gallery/index.yaml", "github:mudler/LocalAI/gallery/virtual.yaml@master", "beside"),
        ("file:///srv/galleries/index.yaml", "file:///srv/galleries/base.yaml", "beside"),
        ("https://a.test/index.yaml", "file:///etc/passwd", ""),
    ],
)
async def test_who_may_send_us_where(gallery: str, url: str, used: str) -> None:
    servers = {name: FakeDocuments({url: BASE}) for name in ("beside", "elsewhere")}
    index = FakeDocuments({gallery: f"- {{name: m, url: '{url}'}}"})
    fetchers = Fetchers(index.fetch, servers["beside"].fetch, servers["elsewhere"].fetch)
    library = ModelLibrary([Gallery("a", gallery)], fetchers, clock=SystemClock())
    entry = await library.find("m")
    if not used:
        with pytest.raises(Invalid, match="a path on this machine"):
            await library.define(entry)
        return
    await library.define(entry)
    assert [name for name, documents in servers.items() if documents.requests] == [used]


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "10.1.2.3", "192.168.0.1", "169.254.169.254", "[::1]", "[fe80::1]", "localhost"]
)
async def test_private_addresses_are_refused(host: str) -> None:
    with pytest.raises(Invalid, match="private network"):
        await refuse_private(f"http://{host}:8080/x")


@pytest.mark.parametrize("host", ["1.1.1.1", "[2606:4700::1111]", "no-such-name.invalid"])
async def test_public_ones_and_those_nobody_here_can_resolve_are_not(host: str) -> None:
    await refuse_private(f"https://{host}/x")


async def test_a_changed_base_document_that_is_a_file_is_seen_at_once(tmp_path: Path) -> None:
    async def refuse(url: str) -> bytes:
        raise Unreachable(f"{url} is down")

    base = tmp_path / "base.yaml"
    (tmp_path / "index.yaml").write_text(f"- name: mine\n  url: file://{base}\n")
    base.write_text(BASE)
    fetcher = IndexFetcher(refuse, base_folder=tmp_path)
    library = ModelLibrary(
        [Gallery("f", f"file://{tmp_path}/index.yaml")],
        Fetchers(fetcher.fetch, fetcher.fetch, fetcher.fetch),
        clock=SystemClock(),
    )
    assert (await library.define(await library.find("mine"))).context_size == 512
    base.write_text(BASE.replace("512", "1024"))
    assert (await library.define(await library.find("mine"))).context_size == 1024
