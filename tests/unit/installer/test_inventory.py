"""What is installed under which names, read from the disk, as the contract lists it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from corral.blobs.folder_listing import list_tree
from corral.contract.codec import encode
from corral.contract.manifest import Manifest
from corral.worker.installer.folder import BackendFolder
from corral.worker.installer.inventory import find_loose_program, read_inventory
from corral.worker.installer.records import Metadata, VersionRecord, write_metadata
from corral.worker.installer.remove import plan_removal

A, B = "sha256:" + "a" * 64, "sha256:" + "b" * 64


@pytest.fixture
def backends(tmp_path: Path) -> Path:
    folder = tmp_path / "backends"
    folder.mkdir()
    return folder


@pytest.fixture
def system(tmp_path: Path) -> Path:
    folder = tmp_path / "system"
    folder.mkdir()
    return folder


def put(backends: Path, name: str, digest: str = A, *, alias: str = "", direct: bool = False, at: str = "1") -> Path:
    """A version, switched to."""
    folder = BackendFolder(backends / name)
    version = folder.begin(digest)
    directory = folder.directory(version)
    (directory / "run.sh").write_text("#!/bin/sh\n")
    metadata = Metadata(
        name=name,
        alias=alias,
        gallery_url="https://g.example/index.yaml",
        installed_at="2026-01-02T03:04:05+01:00",
        version="1.0",
        uri="h.example/x:1",
        digest=digest,
    )
    record = VersionRecord(
        id=version, digest=digest, content_digest=digest, metadata=metadata, direct=direct, made_at=at
    )
    folder.finish(record, list_tree(directory))
    folder.switch(version, at)
    return directory


def put_meta(backends: Path, name: str, build: str) -> None:
    (backends / name).mkdir()
    write_metadata(backends / name, Metadata(name=name, meta_backend_for=build, version="1.0"))


def put_system(system: Path, name: str) -> None:
    (system / name).mkdir()
    (system / name / "run.sh").touch()


def test_rows_on_the_wire(backends: Path, system: Path) -> None:
    put(backends, "cpu-x", alias="x")
    put(backends, "cpu-x", B, alias="x", at="2")
    put_meta(backends, "x", "cpu-x")
    put_system(system, "piper")
    rows = [json.loads(encode(row)) for row in read_inventory(backends, system).rows()]
    assert rows == [
        {
            "name": "cpu-x",
            "is_system": False,
            "is_meta": False,
            "installed_at": "2026-01-02T03:04:05+01:00",
            "gallery_url": "https://g.example/index.yaml",
            "version": "1.0",
            "uri": "h.example/x:1",
            "digest": B,
            "alias": "x",
            "previous": [A],
        },
        {"name": "piper", "is_system": True, "is_meta": False},
        {"name": "x", "is_system": False, "is_meta": True, "version": "1.0", "meta_backend_for": "cpu-x"},
    ]


def test_our_own_build_hides_the_systems(backends: Path, system: Path) -> None:
    put_system(system, "piper")
    put(backends, "piper")
    (row,) = read_inventory(backends, system).rows()
    assert not row.is_system


def test_a_meta_without_its_build_is_no_row(backends: Path) -> None:
    put_meta(backends, "x", "cpu-x")
    assert read_inventory(backends).rows() == ()


def test_one_that_cannot_be_read_does_not_hide_the_others(backends: Path) -> None:
    put(backends, "fine")
    broken = put(backends, "broken")
    broken.with_name(broken.name + ".json").write_text("{")
    (backends / "meta").mkdir()
    (backends / "meta" / "metadata.json").write_text("\0")
    (backends / "loop").symlink_to("loop")
    (backends / "stray").write_text("")
    assert [row.name for row in read_inventory(backends).rows()] == ["fine"]


def test_half_a_version_never_looks_whole(backends: Path) -> None:
    folder = BackendFolder(backends / "x")
    version = folder.begin(A)
    (folder.directory(version) / "run.sh").touch()
    (folder.path / "current").symlink_to(f"versions/{version}")
    assert read_inventory(backends).rows() == ()
    record = VersionRecord(id="sha256-" + "b" * 64)  # a record that is another version's does not count
    (folder.path / "versions" / f"{version}.json").write_bytes(encode(record))
    assert read_inventory(backends).rows() == ()


@pytest.mark.parametrize("target", ["/etc", "../other/versions/x", "versions/../../x", "versions/nonsense", "x"])
def test_a_pointer_to_somewhere_else_is_none(backends: Path, target: str) -> None:
    put(backends, "x")
    (backends / "x" / "current").unlink()
    (backends / "x" / "current").symlink_to(target)
    assert read_inventory(backends).rows() == ()


def test_missing_folders_are_empty(tmp_path: Path) -> None:
    assert read_inventory(tmp_path / "no", tmp_path / "neither").rows() == ()


def test_what_a_name_means(backends: Path, system: Path) -> None:
    put(backends, "cpu-x", alias="shared")
    put(backends, "cuda12-x", alias="shared")
    put_meta(backends, "x", "cuda12-x")
    put_system(system, "piper")
    inventory = read_inventory(backends, system)

    def found(name: str, capability: str = "") -> str | None:
        build = inventory.find(name, capability)
        return build.name if build is not None else None

    assert found("cpu-x") == "cpu-x"
    assert found("x") == "cuda12-x"
    assert found("shared", "nvidia-cuda-12") == "cuda12-x"
    assert found("shared", "default") == "cpu-x"
    assert found("piper") == "piper"
    assert found("unknown") is None
    assert inventory.identity("x") == {"x", "cuda12-x", "shared"}
    assert inventory.identity("cuda12-x") == {"x", "cuda12-x", "shared"}
    assert inventory.identity("unknown") == {"unknown"}


def test_how_a_build_is_run(backends: Path) -> None:
    directory = put(backends, "x")
    build = read_inventory(backends).find("x")
    assert build is not None
    assert build.directory == directory.resolve()
    assert build.manifest == Manifest(protocol="grpc", command=("./run.sh", "--addr", "{host}:{port}"))


def test_programs_without_a_folder(backends: Path, system: Path) -> None:
    (backends / "loose").touch()
    (system / "boxed").mkdir()
    (system / "boxed" / "boxed").touch()
    loose = find_loose_program("loose", backends, system)
    assert loose is not None
    assert loose.manifest.command == (str(backends / "loose"), "--addr", "{host}:{port}")
    boxed = find_loose_program("boxed", backends, system)
    assert boxed is not None
    assert boxed.directory == system / "boxed"
    assert find_loose_program("none", backends, None) is None
    assert find_loose_program("../backends/loose", backends, system) is None


# Deleting: which folders go


@pytest.mark.parametrize(
    ("name", "metas", "direct", "gone"),
    [
        ("cpu-x", {}, False, ("cpu-x",)),
        ("x", {"x": "cpu-x"}, False, ("x", "cpu-x")),  # a meta takes its build along
        ("x", {"x": "cpu-x"}, True, ("x",)),  # unless somebody asked for the build itself
        ("x", {"x": "cpu-x", "y": "cpu-x"}, False, ("x",)),  # or another meta stands for it
        ("cpu-x", {"x": "cpu-x", "y": "cpu-x"}, True, ("x", "y", "cpu-x")),
        ("shared", {"x": "cpu-x"}, False, ("x", "cpu-x")),
        ("alone", {"alone": "missing"}, False, ("alone",)),
    ],
)
def test_what_goes_when_a_name_is_deleted(
    backends: Path, name: str, metas: dict[str, str], direct: bool, gone: tuple[str, ...]
) -> None:
    put(backends, "cpu-x", alias="shared", direct=direct)
    for meta, build in metas.items():
        put_meta(backends, meta, build)
    inventory = read_inventory(backends)
    assert plan_removal(inventory, name, inventory.find(name)) == gone
