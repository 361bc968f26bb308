"""What orders name of a models folder that all machines share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from corral.contract.models import Definition, read_definition
from corral.controller.files.shared_folder import MAX_FILES, SharedFolder, ordered_files
from corral.kit.errors import NotFound, Unavailable


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for path, size in (("a.gguf", 5), ("proj/mm.gguf", 3), ("org/name/config.json", 2), ("org/name/w.safetensors", 9)):
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"x" * size)
    return tmp_path


def a_model(**more: Any) -> Definition:
    return read_definition({"name": "m", "backend": "mock", **more})


def ordered(folder: Path, definition: Definition) -> list[tuple[str, str, int]]:
    files = ordered_files(definition, SharedFolder(folder).rows(definition))
    return [(file.path, file.digest, file.size_bytes) for file in files]


def test_files_have_paths_below_the_folder_and_no_digests(folder: Path) -> None:
    definition = a_model(parameters={"model": "a.gguf"}, mmproj="proj/mm.gguf")
    assert ordered(folder, definition) == [("a.gguf", "", 5), ("proj/mm.gguf", "", 3)]


def test_a_listed_file_is_expected_under_its_name_whatever_its_source_and_digest(folder: Path) -> None:
    listed = {"filename": "proj/mm.gguf", "uri": "https://host.test/other", "sha256": "0" * 64}
    assert ordered(folder, a_model(download_files=[listed])) == [("proj/mm.gguf", "", 3)]


@pytest.mark.parametrize("weights", ["org/name", "huggingface://org/name"])
def test_a_repository_is_the_folder_of_its_name(folder: Path, weights: str) -> None:
    definition = a_model(parameters={"model": weights})
    assert ordered(folder, definition) == [("org/name/config.json", "", 2), ("org/name/w.safetensors", "", 9)]


def test_an_archive_counts_by_what_is_beside_it(folder: Path) -> None:
    listed = {"filename": "proj/all.tar.gz", "uri": "https://host.test/all.tar.gz"}
    definition = a_model(download_files=[listed], parameters={"model": "a.gguf"})
    assert ordered(folder, definition) == [("a.gguf", "", 5)]


def test_a_name_that_only_the_engine_knows_is_no_file(folder: Path) -> None:
    assert ordered(folder, a_model(parameters={"model": "some-hub-name"})) == []


def test_many_files_are_ordered_as_their_folder(folder: Path) -> None:
    for number in range(MAX_FILES):
        (folder / "org" / "name" / f"{number}.bin").write_bytes(b"x")
    assert ordered(folder, a_model(parameters={"model": "org/name"})) == [("org/name", "", 0)]


def test_missing_files_are_named(folder: Path) -> None:
    listed = [{"filename": f"{name}.gguf", "uri": "https://host.test/x"} for name in ("b", "c")]
    with pytest.raises(NotFound, match=r"b\.gguf, c\.gguf are not in the shared models folder .*nothing is fetched"):
        SharedFolder(folder).rows(a_model(download_files=listed))
    with pytest.raises(NotFound, match="org/other is not in"):
        SharedFolder(folder).rows(a_model(parameters={"model": "huggingface://org/other"}))


def test_a_folder_that_is_not_mounted_may_come_back(folder: Path) -> None:
    with pytest.raises(Unavailable, match="mount it on the controller too"):
        SharedFolder(folder / "missing").rows(a_model())


@pytest.mark.parametrize("path", ["../x", "/etc/passwd", "", "nothing.gguf"])
def test_only_files_below_the_folder_are_found(folder: Path, path: str) -> None:
    assert SharedFolder(folder).find(path) is None
    assert SharedFolder(folder).find("a.gguf") == folder / "a.gguf"
