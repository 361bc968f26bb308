"""With a loaded bundle, an upgrade means the bundle's build."""

from __future__ import annotations

import pytest

from corral.contract.messages.backends import NodeBackend, NodeDrift
from corral.controller.backends.bundled_upgrades import is_other_build, split_bundled
from corral.gallery.backends.resolution import Machine
from corral.gallery.backends.upgrades import NodeInventory
from corral.store.records import TargetBuild

MACHINE = Machine("default", "linux/amd64", "3.11")
BUNDLED = TargetBuild("cpu-engine", digest="sha256:new", version="2")


def a_node(name: str, *backends: NodeBackend) -> NodeInventory:
    return NodeInventory(f"id-{name}", name, MACHINE, backends)


def installed(name: str = "cpu-engine", digest: str = "sha256:old", version: str = "1") -> NodeBackend:
    return NodeBackend(name=name, digest=digest, version=version)


def find(name: str, machine: Machine) -> TargetBuild | None:
    return BUNDLED if name == BUNDLED.variant and machine == MACHINE else None


def test_the_bundle_decides_about_its_builds_and_the_galleries_about_the_rest() -> None:
    other = installed("other-engine")
    nodes = [
        a_node("attic", installed(), other),
        a_node("barn", installed(digest="sha256:older")),
        a_node("byre", installed(digest="sha256:new", version="2")),
    ]
    rest, found = split_bundled(nodes, find)
    assert [node.backends for node in rest] == [(other,), (), ()]
    (info,) = found.values()
    assert (info.backend_name, info.installed_digest, info.available_digest, info.available_version) == (
        "cpu-engine",
        "sha256:old",
        "sha256:new",
        "2",
    )
    assert info.node_drift == (NodeDrift("id-barn", "barn", "1", "sha256:older"),)


def test_nothing_to_upgrade() -> None:
    rest, found = split_bundled([a_node("byre", installed(digest="sha256:new"))], find)
    assert found == {}
    assert rest[0].backends == ()


@pytest.mark.parametrize(
    ("digest", "version", "is_other"),
    [
        ("sha256:new", "1", False),
        ("sha256:old", "2", True),
        ("", "1", True),
        ("", "2", False),
        ("", "", False),
    ],
)
def test_digests_decide_then_versions(digest: str, version: str, is_other: bool) -> None:
    assert is_other_build(installed(digest=digest, version=version), BUNDLED) is is_other
