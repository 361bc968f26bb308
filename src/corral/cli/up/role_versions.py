"""Moves gateway and controller of this machine to the version of Corral that `current` names.

`corral fleet upgrade` replaces the worker of this machine, in the folder of versions that this program runs from. When
the operation has ended, the gateway follows, and then the controller; if one of them is not ready in time, both return.
The supervisor itself keeps its version until it is started again.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from corral.cli.up.children import role_command
from corral.cli.up.supervisor import Supervisor
from corral.kit.clock import Clock
from corral.kit.errors import CorralError, Failed
from corral.kit.subprocesses import capture_program, environment_without_secrets

ROLES = ("gateway", "controller")
_POLL_S = 0.2
_CHECK_S = 60.0
_MAX_STARTS = 2  # of a version that ends by itself, before it is given up


@dataclass(frozen=True)
class UpgradePace:
    every_s: float = 2.0
    ready_s: float = 60.0


class RoleVersions:
    def __init__(
        self,
        supervisor: Supervisor,
        program: Path,
        find_current: Callable[[], Path],
        why_wait: Callable[[], Awaitable[str]],
        check: Callable[[Path], Awaitable[None]],
        clock: Clock,
        report: Callable[[str], None],
        *,
        pace: UpgradePace | None = None,
    ) -> None:
        """`program`: the environment that the roles run from. `find_current`: the one that they should run from.
        `why_wait`: why they do not follow yet; empty: they may. `check` raises Failed for a version that cannot run
        them."""
        self._supervisor = supervisor
        self._program = program
        self._find_current = find_current
        self._why_wait = why_wait
        self._check = check
        self._clock = clock
        self._report = report
        self._pace = pace or UpgradePace()
        self._refused: Path | None = None
        self._waits = ""

    async def run(self) -> None:
        while True:
            await self._clock.sleep(self._pace.every_s)
            try:
                await self.run_once()
            except (OSError, CorralError) as error:
                self._report(f"cannot see which version of Corral is current: {error}")

    async def run_once(self) -> bool:
        """True if gateway and controller run another version now."""
        wanted = self._find_current()
        if wanted in (self._program, self._refused):
            return False
        if why := await self._why_wait():
            if why != self._waits:
                self._report(f"gateway and controller will follow to {wanted.name}: {why}")
            self._waits = why
            return False
        self._waits = ""
        try:
            await self._check(wanted)
        except CorralError as error:
            self._refused = wanted
            self._report(f"gateway and controller stay at {self._program.name}: {error.message}")
            return False
        return await self._move(wanted)

    async def _move(self, wanted: Path) -> bool:
        roles = [name for name in ROLES if name in self._supervisor.children]
        for number, name in enumerate(roles, 1):
            self._report(f"{name} moves to the version in {wanted}")
            if not await self._restart(name, wanted):
                self._refused = wanted
                self._report(
                    f"{name} was not ready within {self._pace.ready_s:g} s: it returns to {self._program.name}. "
                    f"Its log says why"
                )
                for moved in reversed(roles[:number]):
                    await self._restart(moved, self._program)
                return False
        self._program = wanted
        if (worker := self._supervisor.children.get("worker")) is not None:
            worker.use(role_command("worker", str(wanted / "bin" / "python")))  # it runs already; for its next start
        self._report(f"gateway and controller run the version in {wanted}")
        return True

    async def _restart(self, name: str, program: Path) -> bool:
        child = self._supervisor.children[name]
        starts = child.starts
        child.use(role_command(name, str(program / "bin" / "python")))
        child.restart()
        until = self._clock.monotonic() + self._pace.ready_s
        while self._clock.monotonic() < until:
            await self._clock.sleep(_POLL_S)
            if child.starts > starts and child.is_ready:
                return True
            if child.starts > starts + _MAX_STARTS:
                return False
        return False


async def check_roles(program: Path) -> None:
    """Let the version load all code of both roles, before anything is stopped. Raises Failed."""
    command = (str(program / "bin" / "python"), "-I", "-c", "import corral.controller.main, corral.gateway.main")
    ran = await capture_program(command, env=environment_without_secrets(os.environ), timeout_s=_CHECK_S)
    if ran.status != 0:
        lines = ran.stderr.strip().splitlines() or [f"exit status {ran.status}"]
        raise Failed(f"{program.name} cannot be loaded: {lines[-1][:300]}")


def describe_open(operations: Sequence[tuple[str, str]]) -> str:
    """Why the roles wait, given kind and id of the open operations. Pure."""
    for kind, operation_id in operations:
        if kind == "corral-upgrade":
            return f"operation {operation_id[:8]} has to end before"
    return ""
