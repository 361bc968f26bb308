"""Which process is which, so that a number the machine has given to somebody else is never taken for one of ours."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import psutil

from corral.contract.codec import Message, Undecodable, always, decode
from corral.worker.supervisor.shim import LINUX, boot_id, start_time

_LISTEN = "0A"  # as /proc/net/tcp writes it


class Identity(Message, frozen=True, kw_only=True):
    """`state.json`, and what the shim says of itself. A process id alone names nothing: with the time it started and
    the boot it belongs to, it does."""

    process_id: str = always(str)
    boot_id: str = always(str)
    pid: int = always(int)
    start: str = always(str)
    shim_pid: int = always(int)
    shim_start: str = always(str)

    @staticmethod
    def read(folder: Path) -> Identity | None:
        try:
            return decode(Identity, (folder / "state.json").read_bytes())
        except (OSError, Undecodable):
            return None


def why_not_this(identity: Identity) -> str | None:
    """Why what runs under these numbers is not what they stood for; None when it is. A backend that has just ended is
    still itself: its shim will say so in a moment."""
    if identity.boot_id != boot_id():
        return "it is of another boot of this machine"
    if start_time(identity.shim_pid) != identity.shim_start:
        return f"process {identity.shim_pid} is not its shim any more"
    if start_time(identity.pid) not in ("", identity.start):
        return f"process {identity.pid} is not its backend any more"
    return None


def is_over(identity: Identity) -> bool:
    """Whether the backend has ended, asked of the kernel: its shim may not have come round to say so. Where that would
    take a program (macOS) its word is waited for."""
    return LINUX and start_time(identity.pid) != identity.start


def leftovers(identity: Identity) -> list[int]:
    """What is left in the session of a shim that was killed. As long as anybody is in there its number is not given
    away, so a leader under that number that started at another time means that nobody of ours is left."""
    if identity.boot_id != boot_id() or identity.shim_pid <= 1:
        return []
    if start_time(identity.shim_pid) not in ("", identity.shim_start):
        return []
    return [pid for pid in psutil.pids() if pid != identity.shim_pid and _session(pid) == identity.shim_pid]


def kill_leftovers(identity: Identity) -> list[int]:
    found = leftovers(identity)
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return found


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except OSError:
        return -1


def listens_elsewhere(port: int, shim_pid: int) -> bool:
    """Whether somebody who is no child of the shim listens on the port. Only where the machine lets us know for sure:
    a backend in a container of its own, or another system than Linux, is believed."""
    inodes = _listening_inodes(port)
    if not inodes:
        return False
    try:
        ours = psutil.Process(shim_pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return False
    return not any(_holds(process.pid, inodes) for process in ours)


def _listening_inodes(port: int) -> set[str]:
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            rows = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for fields in map(str.split, rows):
            if fields[3] == _LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                found.add(f"socket:[{fields[9]}]")
    return found


def _holds(pid: int, inodes: set[str]) -> bool:
    try:
        descriptors = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return False
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/{pid}/fd/{descriptor}") in inodes:
                return True
    return False
