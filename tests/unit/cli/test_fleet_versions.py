"""`corral fleet versions`: what is listed, and the line below it."""

from __future__ import annotations

import msgspec

from corral.cli.fleet.versions import list_versions, summarize
from corral.contract.admin import ControllerView, NodeView


def controller(host: str, version: str, *, live: bool = True) -> ControllerView:
    return ControllerView(id=host, host=host, version=version, live=live)


def node(name: str, version: str, status: str = "healthy") -> NodeView:
    return msgspec.structs.replace(NodeView(id=name, name=name), version=version, status=status)


def test_controllers_and_nodes_are_listed_with_their_versions() -> None:
    found = list_versions(
        [controller("a", "1.2.0"), controller("b", "1.1.0", live=False)],
        [node("w1", "1.2.0"), node("w2", "1.1.0", "offline"), node("localai", "")],
    )
    assert [tuple(each.values()) for each in found] == [
        ("controller", "a", "1.2.0", "live"),
        ("controller", "b", "1.1.0", "gone"),
        ("node", "w1", "1.2.0", "healthy"),
        ("node", "w2", "1.1.0", "offline"),
        ("node", "localai", "unknown", "healthy"),
    ]
    assert summarize(found) == "2 × 1.2.0, 1 × 1.1.0, 1 × unknown"
    assert summarize(found[:2]) == "All run one version.", "a controller that is gone does not count"
