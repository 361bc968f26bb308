"""After a restart of the worker: which of the processes in our folder still run, and are really the ones we left.

Adopted is only what proves itself: a shim lives in the folder (it holds the lock), answers on its socket, is the
process the kernel says is at the other end, and names the same processes as `state.json`, which started when it says.
All else is left alone or declared over; nothing is ever signalled by its number without that proof.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path

from corral.kit.errors import Failed
from corral.worker.supervisor.folders import give_up, nobody_there, ready_at
from corral.worker.supervisor.identity import Identity, kill_leftovers, why_not_this
from corral.worker.supervisor.link import ShimLink
from corral.worker.supervisor.process import Exit
from corral.worker.supervisor.spec import Record

_LOOK_S = 0.02


@dataclass(frozen=True)
class Alive:
    folder: Path
    record: Record
    link: ShimLink
    ready_at: str | None  # None: it was still starting when its worker died


@dataclass(frozen=True)
class Over:
    folder: Path
    record: Record | None
    how: Exit


@dataclass(frozen=True)
class Refused:
    folder: Path
    why: str


async def examine(folder: Path, *, timeout_s: float) -> Alive | Over | Refused:
    """One folder that cannot be read must not keep a worker from starting."""
    try:
        return await _examine(folder, timeout_s)
    except OSError as error:
        return Refused(folder, str(error))


async def _examine(folder: Path, timeout_s: float) -> Alive | Over | Refused:
    record = await asyncio.to_thread(Record.read, folder)
    over = await asyncio.to_thread(_bury_if_over, folder)
    if over is not None:
        return Over(folder, record, over)
    if record is None:
        return Refused(folder, "its spec.json cannot be read")
    identity = await _written_identity(folder, timeout_s)
    if identity is None:
        return Refused(folder, "its shim does not say what it runs")
    if identity.process_id != record.run.process_id or folder.name != identity.process_id:
        return Refused(folder, f"it holds the state of {identity.process_id or 'nobody'}")
    if (why := await asyncio.to_thread(why_not_this, identity)) is not None:
        return Refused(folder, why)
    try:
        link = await ShimLink.open(folder, timeout_s=timeout_s)
    except Failed as error:
        return Refused(folder, error.message)
    if link.identity != identity:
        link.close()
        return Refused(folder, "its shim says it runs something else than was written down")
    return Alive(folder, record, link, await asyncio.to_thread(ready_at, folder))


def _bury_if_over(folder: Path) -> Exit | None:
    with nobody_there(folder) as empty:
        if not empty:
            return None
        how = Exit.read(folder)
        if how is None and (identity := Identity.read(folder)) is not None:
            kill_leftovers(identity)
        return give_up(folder)


async def _written_identity(folder: Path, timeout_s: float) -> Identity | None:
    """A shim that was just started has the lock before it has anything to tell."""
    deadline = time.monotonic() + timeout_s
    while True:
        identity = await asyncio.to_thread(Identity.read, folder)
        if identity is not None or time.monotonic() > deadline:
            return identity
        await asyncio.sleep(_LOOK_S)
