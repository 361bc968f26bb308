"""Names that become folders, builds that share an alias, and requests made of orders."""

from __future__ import annotations

import pytest

from corral.contract.manifest import Manifest
from corral.contract.messages.backends import InstallBackend, UpgradeBackend
from corral.contract.sources import Source
from corral.kit.errors import Invalid
from corral.worker.installer.names import check_name, choose_build
from corral.worker.installer.records import is_version_id, version_id
from corral.worker.installer.requests import InstallRequest, request_of

SOURCE = Source("oci", "h.example/x:1")
DIGEST = "sha256:" + "a" * 64


@pytest.mark.parametrize("name", ["llama-cpp", "cuda12-vllm", "localai@llama-cpp", "a", "x.y_z+1", "A" * 128])
def test_names(name: str) -> None:
    assert check_name(name) == name


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../x", "a/b", "/etc", ".hidden", "-x", "a\0b", "a b", "A" * 129, "x.install-tmp", "x.backup", "é"],
)
def test_what_is_no_name(name: str) -> None:
    with pytest.raises(Invalid, match="cannot name a backend"):
        check_name(name)


@pytest.mark.parametrize(
    ("capability", "chosen"),
    [
        ("nvidia-cuda-12", "cuda12-x"),
        ("nvidia", "cuda12-x"),
        ("amd", "rocm-x"),
        ("intel", "cpu-x"),
        ("metal", "cpu-x"),
        ("darwin-x86", "cpu-x"),
        ("vulkan", "vulkan-x"),
        ("default", "cpu-x"),
        ("", "cpu-x"),
    ],
)
def test_which_of_several_builds_an_alias_means(capability: str, chosen: str) -> None:
    assert choose_build(capability, ["cpu-x", "cuda12-x", "rocm-x", "vulkan-x"]) == chosen


def test_the_first_where_none_stands_out() -> None:
    assert choose_build("default", ["b", "a"]) == "b"


def test_folders_of_versions_have_no_colon() -> None:
    assert version_id(DIGEST) == "sha256-" + "a" * 64
    assert version_id(DIGEST, 3) == "sha256-" + "a" * 64 + ".3"
    assert is_version_id(version_id(DIGEST))
    assert is_version_id(version_id(DIGEST, 3))
    for text in ("", "sha256-" + "a" * 63, "../x", "sha256-" + "a" * 64 + ".0", "sha256-" + "a" * 64 + ".x"):
        assert not is_version_id(text)
    with pytest.raises(Invalid):
        version_id("sha256:..")


def test_an_order_for_a_meta() -> None:
    manifest = Manifest(protocol="openai", command=("serve",))
    order = InstallBackend(
        backend="llama-cpp",
        variant="cpu-llama-cpp",
        alias="llama-cpp",
        digest=DIGEST,
        version="1",
        gallery_url="g",
        sources=(SOURCE,),
        manifest=manifest,
        force=True,
    )
    request = request_of(order)
    assert request == InstallRequest(
        name="cpu-llama-cpp",
        sources=(SOURCE,),
        requested_as="llama-cpp",
        digest=DIGEST,
        alias="llama-cpp",
        version="1",
        gallery_url="g",
        manifest=manifest,
        force=True,
    )
    assert request.names == {"cpu-llama-cpp", "llama-cpp"}


def test_an_order_for_a_build_itself() -> None:
    request = request_of(UpgradeBackend(backend="cpu-x", variant="cpu-x", sources=(SOURCE,)))
    assert (request.name, request.requested_as, request.force) == ("cpu-x", "", False)


def test_an_order_with_a_source_of_its_own() -> None:
    request = request_of(InstallBackend(backend="oci://h/x:1", uri="oci://h/x:1", name="mine", sources=(SOURCE,)))
    assert (request.name, request.requested_as) == ("mine", "")


def test_orders_that_cannot_be_carried_out() -> None:
    with pytest.raises(Invalid, match="names no source"):
        request_of(InstallBackend(backend="x"))
    with pytest.raises(Invalid, match="cannot name a backend"):
        request_of(InstallBackend(backend="../x", sources=(SOURCE,)))


def test_equal_requests_are_the_same_work() -> None:
    first = InstallRequest(name="x", sources=(SOURCE,), manifest=Manifest(protocol="grpc", env={"A": "1"}))
    second = InstallRequest(name="x", sources=(SOURCE,), manifest=Manifest(protocol="grpc", env={"A": "1"}))
    assert first.key == second.key
    assert first.key != InstallRequest(name="x", sources=(SOURCE,), force=True).key
