"""After a restart of the worker: which processes of the folder still run, and are the ones that an earlier worker
started.

A process is adopted only with proof: a shim holds the folder's lock, answers on its socket, is the process at the other
end according to the kernel, and names the same processes and start times as `state.json`. Other processes are left
alone or recorded as ended; no process is ever signalled by its id without this proof.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path

from corral.kit.errors import Failed
from corral.worker.supervisor.folders import give_up, locked_if_ended, ready_at
from corral.worker.supervisor.identity import Identity, kill_leftovers, mismatch_reason
from corral.worker.supervisor.process import Exit, ShimLink
from corral.worker.supervisor.spec import Record

_LOOK_S = 0.02


@dataclass(frozen=True)
class RunningProcess:
    folder: Path
    record: Record
    link: ShimLink
    ready_at: str | None  # None: it was not ready when its worker ended


@dataclass(frozen=True)
class EndedProcess:
    folder: Path
    record: Record | None
    how: Exit


@dataclass(frozen=True)
class NotAdopted:
    folder: Path
    why: str


async def examine(folder: Path, *, timeout_s: float) -> RunningProcess | EndedProcess | NotAdopted:
    """Examine one folder. A folder that cannot be read does not prevent the start of the worker."""
    try:
        return await _examine(folder, timeout_s)
    except OSError as error:
        return NotAdopted(folder, str(error))


async def _examine(folder: Path, timeout_s: float) -> RunningProcess | EndedProcess | NotAdopted:
    record = await asyncio.to_thread(Record.read, folder)
    over = await asyncio.to_thread(_reap_if_ended, folder)
    if over is not None:
        return EndedProcess(folder, record, over)
    if record is None:
        return NotAdopted(folder, "its spec.json cannot be read")
    identity = await _written_identity(folder, timeout_s)
    if identity is None:
        return NotAdopted(folder, "its shim has not written what it runs")
    if identity.process_id != record.run.process_id or folder.name != identity.process_id:
        return NotAdopted(folder, f"it holds the state of {identity.process_id or 'nobody'}")
    if (why := await asyncio.to_thread(mismatch_reason, identity)) is not None:
        return NotAdopted(folder, why)
    try:
        link = await ShimLink.open(folder, timeout_s=timeout_s)
    except Failed as error:
        return NotAdopted(folder, error.message)
    if link.identity != identity:
        link.close()
        return NotAdopted(folder, "its shim reports another process than its state.json")
    return RunningProcess(folder, record, link, await asyncio.to_thread(ready_at, folder))


def _reap_if_ended(folder: Path) -> Exit | None:
    with locked_if_ended(folder) as empty:
        if not empty:
            return None
        how = Exit.read(folder)
        if how is None and (identity := Identity.read(folder)) is not None:
            kill_leftovers(identity)
        return give_up(folder)


async def _written_identity(folder: Path, timeout_s: float) -> Identity | None:
    """Wait for `state.json`: a new shim holds the lock before it writes the file."""
    deadline = time.monotonic() + timeout_s
    while True:
        identity = await asyncio.to_thread(Identity.read, folder)
        if identity is not None or time.monotonic() > deadline:
            return identity
        await asyncio.sleep(_LOOK_S)
