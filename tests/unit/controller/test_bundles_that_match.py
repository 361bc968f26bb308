"""Which build of a bundle a machine gets, and what a model takes from one."""

from __future__ import annotations

import pytest

from corral.contract.bundles import BundledBackend, BundledBuild, BundledFile, BundledModel
from corral.contract.models import ModelFile
from corral.controller.backends.catalogue import MachineKind
from corral.controller.bundles.match import choose_build, is_backend, why_no_build
from corral.controller.bundles.model_files import bundled_model
from corral.controller.files.bundled_files import bundled_rows, keys_of
from corral.kit.errors import Invalid
from corral.store.records import BackendRequest
from corral.store.tables.model_files import StoredFile

DIGEST = "sha256:" + "a" * 64


def a_build(variant: str, capability: str, platform: str = "linux/amd64", python: str = "") -> BundledBuild:
    return BundledBuild(capability=capability, platform=platform, python=python, variant=variant)


BUILDS = (
    a_build("cpu", "default"),
    a_build("cuda", "nvidia"),
    a_build("jetson", "nvidia-l4t", "linux/arm64"),
    a_build("wheels", "default", "darwin/arm64", "3.12"),
)


@pytest.mark.parametrize(
    ("kind", "variant"),
    [
        (MachineKind("default", "linux/amd64", "3.11"), "cpu"),
        (MachineKind("", "linux/amd64"), "cpu"),
        (MachineKind("nvidia", "linux/amd64"), "cuda"),
        (MachineKind("nvidia-cuda-12", "linux/amd64"), "cuda"),
        (MachineKind("amd", "linux/amd64"), "cpu"),
        (MachineKind("nvidia-l4t-cuda-12", "linux/arm64"), "jetson"),
        (MachineKind("default", "linux/arm64"), None),
        (MachineKind("metal", "darwin/arm64", "3.12"), "wheels"),
        (MachineKind("metal", "darwin/arm64", "3.11"), None),
    ],
)
def test_a_machine_gets_the_build_of_its_kind(kind: MachineKind, variant: str | None) -> None:
    found = choose_build(BUILDS, kind)
    assert (found.variant if found is not None else None) == variant


def test_the_reason_names_what_there_is_and_the_option() -> None:
    text = why_no_build("engine", BUILDS[:1], MachineKind("default", "linux/arm64", "3.12"))
    assert "has engine for linux/amd64, default, and not for linux/arm64, default, Python 3.12" in text
    assert "--machine linux/arm64,default,3.12" in text


@pytest.mark.parametrize(
    ("request_", "is_meant"),
    [
        (BackendRequest("engine"), True),
        (BackendRequest("Engine"), True),
        (BackendRequest("other-name"), True),
        (BackendRequest("engine", gallery="farm"), True),
        (BackendRequest("farm@engine"), True),
        (BackendRequest("bundle@engine"), True),
        (BackendRequest("engine", gallery="elsewhere"), False),
        (BackendRequest("engine", uri="oci://host/engine:1"), False),
        (BackendRequest("engine", galleries="[]"), False),
        (BackendRequest("engines"), False),
    ],
)
def test_a_request_means_a_backend(request_: BackendRequest, is_meant: bool) -> None:
    assert is_backend(BundledBackend("engine", "farm", alias="other-name"), request_) is is_meant


def test_a_backend_without_a_gallery_is_meant_by_its_uri() -> None:
    direct = BundledBackend("engine", uri="oci://host/engine:1")
    assert is_backend(direct, BackendRequest("engine", uri="oci://host/engine:1"))
    assert not is_backend(direct, BackendRequest("engine"))


def a_row(path: str, uri: str) -> StoredFile:
    return StoredFile(model="m", path=path, uri=uri, resolved=f"{uri}#1", digest=DIGEST, size_bytes=5)


def test_a_model_takes_all_rows_of_the_bundled_model_that_has_one_of_its_files() -> None:
    bundled = (
        BundledFile("voices.tar/", "https://host/voices.tar", "r", DIGEST, 9),
        BundledFile("it/model.onnx", "unpacked://x", "r", DIGEST, 5),
    )
    wanted = keys_of([ModelFile("voices.tar", "https://host/voices.tar")], ())
    rows = bundled_rows("mine", wanted, {}, [bundled])
    assert [(row.model, row.path) for row in rows] == [("mine", "voices.tar/"), ("mine", "it/model.onnx")]
    assert bundled_rows("mine", wanted, {row.path: row for row in rows}, [bundled]) == [], "they are stored already"
    other = keys_of([ModelFile("voices.tar", "https://elsewhere/voices.tar")], ())
    assert bundled_rows("mine", other, {}, [bundled]) == []


def test_files_of_this_machine_become_uploaded_files() -> None:
    model = BundledModel("m", "", {"name": "m", "parameters": {"model": "sub/our file.gguf"}})
    found = bundled_model(model, [a_row("sub/our file.gguf", "file:///models/sub/our%20file.gguf")])
    (file,) = found.files
    assert file.uri == f"upload://{'a' * 64}/our%20file.gguf"
    assert found.definition["download_files"] == [
        {"filename": "sub/our file.gguf", "uri": file.uri, "sha256": "a" * 64}
    ]
    assert found.definition["parameters"] == {"model": "sub/our file.gguf"}


def test_other_files_and_definitions_stay_as_they_are() -> None:
    definition = {"name": "m", "download_files": [{"filename": "w", "uri": "https://host/w"}]}
    found = bundled_model(BundledModel("m", "", definition), [a_row("w", "https://host/w")])
    assert found.definition == definition
    assert found.files == (BundledFile("w", "https://host/w", "https://host/w#1", DIGEST, 5),)


def test_an_archive_of_this_machine_is_refused() -> None:
    with pytest.raises(Invalid, match="unpack it there by hand"):
        bundled_model(BundledModel("m", "", {"name": "m"}), [a_row("voices.tar/", "file:///voices.tar")])
