"""Two `corral up` of one person: commands stay with the first, each is reached by name, and none goes astray."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.fleet import PATIENT, Fleet

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def fleets(tmp_path: Path) -> Iterator[tuple[Fleet, Fleet]]:
    first = Fleet(tmp_path / "one", "--no-worker", **PATIENT)
    second = Fleet(tmp_path / "two", "--no-worker", "--context", "test", **PATIENT)
    config = {"CORRAL_CONFIG_DIR": str(tmp_path / "config")}
    try:
        for fleet in (first, second):
            fleet.root.mkdir()
            fleet.env |= config
            fleet.start()
            fleet.join_line()  # its greeting is there: it has announced itself
        yield first, second
    finally:
        second.close()
        first.close()


def keys(fleet: Fleet, *more: str) -> set[str]:
    ran = fleet.cli("keys", "list", "--json", *more)
    assert (ran.returncode, ran.stderr) == (0, "")
    return {each["name"] for each in json.loads(ran.stdout)}


def test_commands_stay_with_the_first_fleet_and_reach_both_by_name(fleets: tuple[Fleet, Fleet]) -> None:
    first, second = fleets
    assert second.up is not None
    assert "--context test" in second.up.output()
    assert first.cli("keys", "create", "mine").returncode == 0
    assert first.cli("keys", "create", "theirs", "--context", "test").returncode == 0
    assert "mine" in keys(first)
    assert "theirs" not in keys(first)
    assert "theirs" in keys(first, "--context", "test")

    listed = json.loads(first.cli("contexts", "list", "--json").stdout)
    assert [(each["name"], each["current"], each["running"]) for each in listed] == [
        ("data", True, True),
        ("test", False, True),
    ]

    # What takes something away names the fleet, and needs a name or a yes.
    ran = first.cli("keys", "revoke", "0" * 12)
    assert ran.returncode == 2
    assert f"this command would change the fleet 'data' ({first.url}, {first.data})" in ran.stderr
    assert f"not 'test' ({second.url}, {second.data}): choose a fleet with --context, or add --yes" in (ran.stderr)
    ran = first.cli("nodes", "delete", "nobody", "--yes")
    assert f"This command changes the fleet 'data' ({first.url}, {first.data})" in ran.stderr
    ran = first.cli("nodes", "delete", "nobody", "--yes", "--context", "test")
    assert "This command changes" not in ran.stderr

    assert first.cli("contexts", "use", "test").returncode == 0
    assert "theirs" in keys(first)
    second.close()
    assert "mine" in keys(first)
    assert "no context 'test': the contexts are data" in first.refused("keys", "list", "--context", "test")
    assert "'data'" not in first.cli("nodes", "delete", "nobody", "--yes").stderr  # only one runs: nothing to confuse


def test_the_first_stops_and_the_second_stays_usable(fleets: tuple[Fleet, Fleet]) -> None:
    first, second = fleets
    assert second.cli("keys", "create", "theirs", "--context", "test").returncode == 0
    first.close()
    assert "theirs" in keys(second)
    again = Fleet(first.root / "more", "--no-worker", "--context", "test")
    again.env |= {"CORRAL_CONFIG_DIR": second.env["CORRAL_CONFIG_DIR"]}
    said = again.refused("up", "--data", str(again.data), "--port", str(again.port), "--context", "test")
    assert f"context 'test' ({second.url}, {second.data}) runs already" in said
