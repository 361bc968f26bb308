"""Which files a definition means, what they are called on a worker, and several of them as one bar."""

from __future__ import annotations

import itertools
import os
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from corral.blobs.progress import FilesProgress, Progress
from corral.contract.messages.backends import Phase
from corral.contract.messages.replicas import ReplicaFile
from corral.contract.models import read_definition
from corral.controller.files.blob_listener import Certificate, default_url
from corral.controller.files.file_resolver import FileResolver, ResolverSettings
from corral.controller.files.required_files import current_files, required_files, required_snapshots, worker_files
from corral.controller.models.folder import with_local_files
from corral.kit.certificates import Ca, make_ca
from corral.kit.errors import Invalid
from corral.kit.settings import BadSettings
from corral.store.tables.model_files import StoredFile


def wanted(folder: Path | None = None, **words: Any) -> list[tuple[str, str]]:
    definition = read_definition({"name": "m", "backend": "b"} | words)
    return [(file.path, file.uri) for file in required_files(definition, folder)]


FILES = [{"filename": "a.json", "uri": "https://x/a"}, {"filename": "w.gguf", "uri": "https://x/w"}]


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ({}, []),
        ({"parameters": {"model": "org/hub-id"}}, []),
        ({"download_files": FILES}, [("a.json", "https://x/a"), ("w.gguf", "https://x/w")]),
        (
            {"parameters": {"model": "w.gguf"}, "download_files": FILES},
            [("w.gguf", "https://x/w"), ("a.json", "https://x/a")],
        ),
        ({"parameters": {"model": "https://x/y/z.gguf?download=1"}}, [("z.gguf", "https://x/y/z.gguf?download=1")]),
        (
            {"parameters": {"model": "huggingface://o/r/sub/z.gguf@main"}},
            [("z.gguf", "huggingface://o/r/sub/z.gguf@main")],
        ),
        ({"parameters": {"model": "https://x/w"}, "download_files": FILES[1:]}, [("w.gguf", "https://x/w")]),
        (
            {"parameters": {"model": "w.gguf"}, "mmproj": "https://x/p.gguf", "download_files": FILES[1:]},
            [("w.gguf", "https://x/w"), ("p.gguf", "https://x/p.gguf")],
        ),
        ({"lora_adapters": ["https://x/l1", "l2"]}, [("l1", "https://x/l1")]),
    ],
)
def test_which_files(words: dict[str, Any], found: list[tuple[str, str]]) -> None:
    assert wanted(**words) == found


@pytest.mark.parametrize("name", ["a b.gguf", "a#1.gguf", "a?b.gguf", "a%20b.gguf"])
async def test_whatever_weights_beside_a_definition_are_called_they_are_found(tmp_path: Path, name: str) -> None:
    (tmp_path / "a").write_bytes(b"another")
    (tmp_path / "a b.gguf").write_bytes(b"another")
    (tmp_path / name).write_bytes(b"weights of it")
    definition = with_local_files(
        read_definition({"name": "m", "backend": "b", "parameters": {"model": name}}), tmp_path
    )
    nobody: Any = None
    origins = FileResolver(nobody, nobody, nobody, ResolverSettings(folders=(tmp_path,)))
    [file] = definition.files
    found = await origins.find(file)
    assert (file.path, found.name, found.size_bytes) == (name, name, 13)


def test_a_name_that_no_disk_takes_is_no_file_there(tmp_path: Path) -> None:
    long = "w" * 300
    assert wanted(tmp_path, parameters={"model": long}) == []
    assert required_snapshots(
        read_definition({"name": "m", "backend": "vllm", "parameters": {"model": f"org/{long}"}}), tmp_path
    )


def test_what_cannot_be_meant() -> None:
    with pytest.raises(Invalid, match="two files"):
        wanted(parameters={"model": "https://x/w.gguf"}, download_files=[{"filename": "w.gguf", "uri": "https://y/w"}])
    with pytest.raises(Invalid, match="file's name"):
        wanted(parameters={"model": "https://x/"})


def test_files_in_the_models_folder(tmp_path: Path) -> None:
    (tmp_path / "w.gguf").write_bytes(b"w")
    assert wanted(tmp_path, parameters={"model": "w.gguf"}) == [("w.gguf", f"file://{tmp_path}/w.gguf")]
    assert wanted(tmp_path, parameters={"model": "absent.gguf"}) == []


def test_other_files_are_another_set() -> None:
    one, two = ReplicaFile("w", "sha256:" + "1" * 64, 1), ReplicaFile("w", "sha256:" + "2" * 64, 1)
    (first,), (again,), (other,) = (worker_files("org/m", [file]) for file in (one, one, two))
    assert first == again
    assert first.path.startswith("org/m/")
    assert first.path.endswith("/w")
    assert first.path != other.path
    (renamed,) = worker_files("org/m", [ReplicaFile("v", one.digest, 1)])
    assert renamed.path.split("/")[2] != first.path.split("/")[2]


def test_several_files_are_one_bar_that_never_goes_back() -> None:
    told: list[Progress] = []
    bar = FilesProgress([100, 0, 50], told.append, lambda: 0.0)
    bar.complete(0)
    second, third = bar.listener(1), bar.listener(2)
    second(Progress(Phase.DOWNLOADING, "b", 10))
    second(Progress(Phase.DOWNLOADING, "b", 20, 40))
    second(Progress(Phase.DOWNLOADING, "b", 0, 40))  # begun again
    second(Progress(Phase.EXTRACTING, "b", 1, 40))
    bar.complete(1)
    third(Progress(Phase.DOWNLOADING, "c", 50, 50))
    assert [(each.current_bytes, each.total_bytes, each.file_index) for each in told] == [
        (110, 0, 2),
        (120, 190, 2),
        (120, 190, 2),
        (140, 190, 2),
        (190, 190, 3),
    ]
    assert {each.file_count for each in told} == {3}


def test_unpacking_moves_the_bar_too() -> None:
    """An archive of 100 bytes beside a file of 100."""
    told: list[Progress] = []
    bar = FilesProgress([100, 100], told.append, lambda: 0.0, unpacked=[0])
    archive, other = bar.listener(0), bar.listener(1)
    archive(Progress(Phase.DOWNLOADING, "a.tgz", 100, 100))
    bar.fetched(0)
    archive(Progress(Phase.EXTRACTING, "a.tgz", 0, 100))
    other(Progress(Phase.DOWNLOADING, "b", 50, 100))
    archive(Progress(Phase.EXTRACTING, "a.tgz", 20, 100))
    other(Progress(Phase.DOWNLOADING, "b", 100, 100))
    for done in (40, 30, 100, 140):
        archive(Progress(Phase.EXTRACTING, "a.tgz", done, 100, 7.0))
    assert [(each.phase, each.current_bytes, each.total_bytes) for each in told] == [
        ("downloading", 100, 200),
        ("extracting", 100, 200),  # while another file still comes, what came is what people want to see
        ("downloading", 150, 200),
        ("extracting", 150, 200),
        ("downloading", 200, 200),
        ("extracting", 40, 100),
        ("extracting", 40, 100),
        ("extracting", 100, 100),
        ("extracting", 100, 100),
    ]
    shares = [round(each.share or 0, 4) for each in told]
    assert shares == [0.325, 0.325, 0.575, 0.61, 0.86, 0.895, 0.895, 1.0, 1.0]
    assert told[-1].rate == 7.0


def test_a_file_that_is_done_is_unpacked_too() -> None:
    told: list[Progress] = []
    bar = FilesProgress([100, 100], told.append, lambda: 0.0, unpacked=[0])
    bar.complete(0)
    bar.listener(1)(Progress(Phase.DOWNLOADING, "b", 50, 100))
    assert told[-1].share == 0.75


@pytest.mark.parametrize(
    ("host", "secure", "url"),
    [
        ("127.0.0.1", False, "http://127.0.0.1:8090"),
        ("0.0.0.0", True, "https://{host}:8090"),
        ("::", False, "http://{host}:8090"),
        ("10.0.0.2", True, "https://10.0.0.2:8090"),
        ("fd00::1", True, "https://[fd00::1]:8090"),
    ],
)
def test_what_workers_are_told(host: str, secure: bool, url: str) -> None:
    assert default_url(host, 8090, secure=secure) == url


def test_a_renewed_certificate_is_used(tmp_path: Path) -> None:
    now = datetime.now(UTC)
    made = make_ca("test", now)
    crt, key = tmp_path / "crt", tmp_path / "key"
    written_s = itertools.count(1_800_000_000)

    def write() -> None:
        issued = Ca(made.certificate_pem, made.key_pem).issue_server(["x"], now, life=timedelta(days=1))
        for path, text in ((key, issued.key_pem), (crt, issued.certificate_pem)):
            path.write_text(text)
            at = next(written_s)  # a file system's own clock may not have moved since the last one
            os.utime(path, (at, at))

    with pytest.raises(BadSettings):
        Certificate(crt, None)
    with pytest.raises(BadSettings):
        Certificate(crt, key)
    assert Certificate(None, None).context() is None
    write()
    certificate = Certificate(crt, key)
    first = certificate.context()
    assert isinstance(first, ssl.SSLContext)
    assert certificate.context() is first
    crt.write_text("being written")
    assert certificate.context() is first
    write()
    assert certificate.context() is not first


def test_what_was_there_before_is_no_speed() -> None:
    told: list[Progress] = []
    now = 0.0
    bar = FilesProgress([1000, 1000, 100], told.append, lambda: now)
    bar.complete(2)
    first, second = bar.listener(0), bar.listener(1)
    first(Progress(Phase.DOWNLOADING, "a", 900, 1000))  # resumed there
    now = 1.0
    first(Progress(Phase.DOWNLOADING, "a", 1000, 1000))
    assert (told[-1].current_bytes, told[-1].rate) == (1100, 100.0)
    now = 2.0
    second(Progress(Phase.DOWNLOADING, "b", 500, 1000))
    assert (told[-1].current_bytes, told[-1].rate) == (1600, 50.0)


def stored(path: str, uri: str, digest: str = "sha256:" + "a" * 64) -> StoredFile:
    return StoredFile(model="m", path=path, uri=uri, resolved=uri, digest=digest, size_bytes=7)


HUB = "huggingface://org/repo@main"


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        ({"download_files": [{"filename": "w.gguf", "uri": "https://x/w"}]}, ["w.gguf"]),
        ({"download_files": [{"filename": "w.gguf", "uri": "https://x/other"}]}, []),
        ({"download_files": [{"filename": "w.gguf", "uri": "https://x/w", "sha256": "a" * 64}]}, ["w.gguf"]),
        ({"download_files": [{"filename": "w.gguf", "uri": "https://x/w", "sha256": "b" * 64}]}, []),
        ({"parameters": {"model": "https://x/w"}}, ["w.gguf"]),
        ({"parameters": {"model": "own.gguf"}}, ["own.gguf"]),
        ({"parameters": {"model": "folder"}}, ["folder/a", "folder/b"]),
        ({"parameters": {"model": "org/repo"}, "backend": "vllm"}, ["org/repo/a"]),
        ({"parameters": {"model": "org/other"}, "backend": "vllm"}, []),
        ({}, []),
    ],
)
def test_of_what_was_fetched_before_an_edit_only_what_is_still_meant_counts(
    words: dict[str, Any], kept: list[str]
) -> None:
    rows = [
        stored("w.gguf", "https://x/w"),
        stored("own.gguf", "file:///models/own.gguf"),
        stored("folder/a", "file:///models/folder/a"),
        stored("folder/b", "file:///models/folder/b"),
        stored("org/repo/", HUB),
        stored("org/repo/a", "huggingface://org/repo@0123/a"),
    ]
    definition = read_definition({"name": "m", "backend": "b"} | words)
    assert [row.path for row in current_files(definition, rows)] == kept
