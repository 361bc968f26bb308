"""What `corral fleet upgrade` says of its plan."""

from __future__ import annotations

from corral.cli.fleet.upgrade import note_on_downgrades
from corral.contract.releases import FleetUpgradeNode, FleetUpgradePlan


def plan(**versions: str) -> FleetUpgradePlan:
    nodes = tuple(FleetUpgradeNode(name, version, "upgrade") for name, version in versions.items())
    return FleetUpgradePlan(1, "1.9.0", "", 0, "25%", nodes)


def test_going_back_is_called_that() -> None:
    assert note_on_downgrades(plan(attic="1.8.0", barn="", cellar="1.9.0")) == ""
    assert note_on_downgrades(plan(attic="1.10.0", barn="1.8.0")) == (
        "Note: this goes back to an earlier version on attic."
    )
    many = plan(a="2.0", b="2.0", c="2.0", d="2.0", e="1.0")
    assert note_on_downgrades(many) == "Note: this goes back to an earlier version on a, b, c and 1 more."
