"""Finds the process that listens on a port of this machine: a process of some Corral fleet, or another program."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath

import psutil

PUBLIC, BUS, INGRESS = (
    "--port",
    "--bus-port",
    "--ingress-port",
)  # the purpose of a port, named by the flag of `corral up`
_BUS_PROGRAM = "nats-server"
_ROLES = frozenset({"up", "controller", "gateway", "worker", "join"})
_LISTENERS = {
    PUBLIC: frozenset({"up", "gateway"}),
    BUS: frozenset({"up"}),
    INGRESS: frozenset({"up", "worker", "join"}),
}
_GENERATIONS = 4  # processes of a gateway, and the bus, are children of the process that was started
Connection = tuple[int, int | None]  # of a listener: port, and pid if this user may see it


@dataclass(frozen=True)
class Program:
    pid: int
    uid: int
    command: tuple[str, ...]
    parent: int = 0

    @property
    def name(self) -> str:
        return PurePath(self.command[0]).name if self.command else "an unknown program"

    @property
    def role(self) -> str:
        """The `corral` command that the process runs, or empty."""
        for before, word in zip(self.command, self.command[1:], strict=False):
            if word in _ROLES and (before == "corral.cli.main" or PurePath(before).name == "corral"):
                return word
        return ""


@dataclass(frozen=True)
class Owner:
    words: str
    is_ours: bool


def find_owner(port: int, purpose: str) -> Owner | None:
    """The owner of a port, or None if it cannot be found out. `purpose`: the flag of `corral up` for such a port."""
    connections, blind = _listeners()
    return choose_owner(port, purpose, connections, _programs(), us=None if blind else os.getuid())


def choose_owner(
    port: int, purpose: str, connections: Iterable[Connection], programs: Mapping[int, Program], *, us: int | None
) -> Owner | None:
    """Pure. `us`: the user of this process, whose listeners are visible; None: no listeners are visible."""
    pids = [pid for known, pid in connections if known == port and pid]
    for pid in pids:
        if role := _role_above(pid, programs):
            return Owner(f"`corral {role}` (pid {pid})", is_ours=True)
    roles = [program for program in programs.values() if program.role]
    for pid in pids:
        name = programs[pid].name if pid in programs else "an unknown program"
        return Owner(f"{name} (pid {pid})", is_ours=bool(roles) and name == _BUS_PROGRAM)
    hidden = [program for program in programs.values() if us is None or program.uid != us]
    for program in hidden:
        if program.role in _LISTENERS.get(purpose, ()):
            return Owner(f"`corral {program.role}` (pid {program.pid}), most likely", is_ours=True)
    for program in hidden:
        if purpose == BUS and roles and program.name == _BUS_PROGRAM:
            return Owner(f"{_BUS_PROGRAM} (pid {program.pid}), most likely", is_ours=True)
    return None


def _role_above(pid: int, programs: Mapping[int, Program]) -> str:
    """The role of the process or of one of its ancestors."""
    for _ in range(_GENERATIONS):
        if (program := programs.get(pid)) is None:
            return ""
        if program.role:
            return program.role
        pid = program.parent
    return ""


def _listeners() -> tuple[Sequence[Connection], bool]:
    """The listeners, and True if this user may see none at all, not even its own."""
    try:
        found = psutil.net_connections(kind="tcp")
    except (psutil.Error, OSError):
        return (), True
    return [(each.laddr.port, each.pid) for each in found if each.status == psutil.CONN_LISTEN and each.laddr], False


def _programs() -> dict[int, Program]:
    """Every process that this user may see."""
    programs = {}
    for process in psutil.process_iter(["cmdline", "uids", "ppid"]):
        seen = process.info
        uid = seen["uids"].real if seen["uids"] else -1
        programs[process.pid] = Program(process.pid, uid, tuple(seen["cmdline"] or ()), seen["ppid"] or 0)
    return programs
