"""Identifies processes by id, start time and boot, as the kernel gives an id to another process later."""

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
    """`state.json`, and the shim's first message. A process id is unique only together with start time and boot."""

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


def mismatch_reason(identity: Identity) -> str | None:
    """Why the processes with these ids are other ones; None when they are the same. A backend that has just ended
    counts as the same: its shim reports the end in a moment."""
    if identity.boot_id != boot_id():
        return "it is of another boot of this machine"
    if start_time(identity.shim_pid) != identity.shim_start:
        return f"process {identity.shim_pid} is not its shim any more"
    if start_time(identity.pid) not in ("", identity.start):
        return f"process {identity.pid} is not its backend any more"
    return None


def has_ended(identity: Identity) -> bool:
    """Whether the backend has ended according to the kernel: its shim may not have reported it yet. On macOS, where
    this needs another program, only the shim's report counts."""
    return LINUX and start_time(identity.pid) != identity.start


def leftovers(identity: Identity) -> list[int]:
    """Processes in the session of a shim that was killed. The kernel does not reuse the session's id while the session
    has processes, so a leader with another start time means that none of ours is left."""
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
    """Whether a process that is no child of the shim listens on the port. False where that cannot be determined: for a
    backend in a container of its own, and on systems other than Linux. Raises PermissionError where the worker may not
    look: as root without CAP_SYS_PTRACE, while the backend is another user."""
    inodes = _listener_inodes(port)
    if not inodes:
        return False
    try:
        ours = psutil.Process(shim_pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return False
    hidden: PermissionError | None = None
    for process in ours:
        try:
            if _holds(process.pid, inodes):
                return False
        except PermissionError as error:
            hidden = error
    if hidden is not None:
        raise hidden
    return True


def _listener_inodes(port: int) -> set[str]:
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
    except (FileNotFoundError, ProcessLookupError):
        return False
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/{pid}/fd/{descriptor}") in inodes:
                return True
    return False
