"""How large people are told that a model is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from corral.contract.models import read_definition
from corral.controller.files.required_files import MemberUri, member_uri
from corral.controller.files.sizes import FileSizes
from corral.store.tables.model_files import StoredFile

A, B = "https://a.test/a.gguf", "https://a.test/b.gguf"
DIGEST = "sha256:" + "d" * 64
ARCHIVE = "https://a.test/all.tar.gz"


def row(path: str, uri: str, size_bytes: int) -> StoredFile:
    return StoredFile(model="m", path=path, uri=uri, resolved=uri, digest=DIGEST, size_bytes=size_bytes)


def listed(*files: tuple[str, str, int]) -> dict[str, Any]:
    return {"download_files": [{"filename": path, "uri": uri, "size": size} for path, uri, size in files]}


def inside(path: str, size_bytes: int) -> StoredFile:
    return row(path, member_uri(MemberUri(DIGEST, path, "all.tar.gz", ARCHIVE)), size_bytes)


@pytest.mark.parametrize(
    ("definition", "stored", "measured"),
    [
        ({}, [], (0, 0)),
        (listed(("a.gguf", A, 700)), [], (1, 700)),  # declared
        (listed(("a.gguf", A, 0)), [], (1, 0)),  # nobody knows
        (listed(("a.gguf", A, 0)), [row("a.gguf", A, 900)], (1, 900)),  # fetched
        (listed(("a.gguf", A, 700)), [row("a.gguf", A, 900)], (1, 900)),  # what it is, not what was said
        (listed(("a.gguf", B, 0)), [row("a.gguf", A, 900)], (1, 0)),  # fetched for an earlier definition
        (listed(("a.gguf", A, 0), ("b.gguf", B, 30)), [row("a.gguf", A, 900)], (2, 930)),
        ({"parameters": {"model": A}}, [], (1, 0)),
        ({"parameters": {"model": A}}, [row("a.gguf", A, 900)], (1, 900)),
        (listed(("all.tar.gz", ARCHIVE, 50)), [row("all.tar.gz", ARCHIVE, 60)], (1, 60)),
        (
            listed(("all.tar.gz", ARCHIVE, 50)),
            [row("all.tar.gz", ARCHIVE, 60), inside("x.bin", 100), inside("y.bin", 20)],
            (1, 120),
        ),
    ],
)
def test_what_is_known(
    tmp_path: Path, definition: dict[str, Any], stored: list[StoredFile], measured: tuple[int, int]
) -> None:
    found = read_definition({"name": "m", "backend": "mock", **definition})
    assert FileSizes(tmp_path, (tmp_path,)).measure(found, stored) == measured


def test_files_on_disk(tmp_path: Path) -> None:
    models, elsewhere = tmp_path / "models", tmp_path / "elsewhere"
    (models / "folder").mkdir(parents=True)
    elsewhere.mkdir()
    (models / "local.gguf").write_bytes(b"x" * 500)
    (models / "folder" / "one.bin").write_bytes(b"x" * 30)
    (models / "folder" / "two.bin").write_bytes(b"x" * 4)
    (elsewhere / "secret").write_bytes(b"x" * 77)
    (models / "link.gguf").symlink_to(elsewhere / "secret")
    sizes = FileSizes(models, (models,))

    def measure(**definition: Any) -> tuple[int, int]:
        return sizes.measure(read_definition({"name": "m", "backend": "mock", **definition}), [])

    assert measure(parameters={"model": "local.gguf"}) == (1, 500)
    assert measure(parameters={"model": "folder"}) == (2, 34)
    assert measure(**listed(("a", f"file://{models}/local.gguf", 0))) == (1, 500)
    assert measure(**listed(("a", f"file://{models}/gone.gguf", 0))) == (1, 0)
    # Of what may not be taken from there, not even the size is told.
    assert measure(**listed(("a", f"file://{elsewhere}/secret", 0))) == (1, 0)
    assert measure(parameters={"model": "link.gguf"}) == (1, 0)
