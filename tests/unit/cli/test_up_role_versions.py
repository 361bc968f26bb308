"""Gateway and controller follow the worker of their machine to another version, one after the other, and both return
when one of them is not ready."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from corral.cli.up.role_versions import RoleVersions, UpgradePace, describe_open
from corral.kit.errors import Failed
from tests.support.manual_clock import ManualClock

OLD, NEW = Path("/corral/versions/old"), Path("/corral/versions/new")


class FakeChild:
    def __init__(self, log: list[str], name: str, broken: bool) -> None:
        self._log, self._name, self._broken = log, name, broken
        self.starts, self.is_ready = 1, True
        self.program = OLD

    def use(self, command: tuple[str, ...]) -> None:
        self.program = Path(command[0]).parent.parent
        assert command[1:] == ("-P", "-m", "corral.cli.main", self._name)

    def restart(self) -> None:
        self._log.append(f"{self._name} {self.program.name}")
        self.is_ready = not (self._broken and self.program == NEW)
        self.starts += 1 if self.is_ready else 3


class Machine:
    def __init__(self, *broken: str) -> None:
        self.log: list[str] = []
        self.said: list[str] = []
        self.current = NEW
        self.waits = ""
        self.error = ""
        self.children = {
            name: FakeChild(self.log, name, name in broken) for name in ("controller", "gateway", "worker")
        }
        supervisor: Any = self
        clock: Any = ManualClock()
        self.versions = RoleVersions(
            supervisor,
            OLD,
            lambda: self.current,
            self.why_wait,
            self.check,
            clock,
            self.said.append,
            pace=UpgradePace(ready_s=5.0),
        )

    async def why_wait(self) -> str:
        return self.waits

    async def check(self, program: Path) -> None:
        if self.error:
            raise Failed(self.error)

    def programs(self) -> dict[str, str]:
        return {name: child.program.name for name, child in self.children.items()}


async def test_the_gateway_follows_and_then_the_controller() -> None:
    machine = Machine()
    assert await machine.versions.run_once()
    assert machine.log == ["gateway new", "controller new"]
    assert machine.programs() == {"controller": "new", "gateway": "new", "worker": "new"}
    assert not await machine.versions.run_once(), "nothing is left to do"
    assert len(machine.log) == 2


@pytest.mark.parametrize(
    ("broken", "steps"),
    [
        ("gateway", ["gateway new", "gateway old"]),
        ("controller", ["gateway new", "controller new", "controller old", "gateway old"]),
    ],
)
async def test_what_is_not_ready_returns_and_is_not_tried_again(broken: str, steps: list[str]) -> None:
    machine = Machine(broken)
    assert not await machine.versions.run_once()
    assert machine.log == steps
    assert machine.programs() == {"controller": "old", "gateway": "old", "worker": "old"}
    assert f"{broken} was not ready within 5 s: it returns to old" in machine.said[-1]
    assert not await machine.versions.run_once()
    assert machine.log == steps
    machine.current = OLD
    assert not await machine.versions.run_once()


async def test_they_wait_for_the_end_of_the_operation() -> None:
    machine = Machine()
    machine.waits = describe_open([("install", "x" * 36), ("corral-upgrade", "3f2a91c0-1")])
    assert machine.waits == "operation 3f2a91c0 has to end before"
    assert not await machine.versions.run_once()
    assert not await machine.versions.run_once()
    assert (machine.log, len(machine.said)) == ([], 1), "it is reported once"
    machine.waits = describe_open([("install", "x")])
    assert await machine.versions.run_once()


async def test_a_version_that_cannot_be_loaded_stops_nothing() -> None:
    machine = Machine()
    machine.error = "new cannot be loaded: ImportError"
    assert not await machine.versions.run_once()
    assert (machine.log, machine.said) == (
        [],
        ["gateway and controller stay at old: new cannot be loaded: ImportError"],
    )
