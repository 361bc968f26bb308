"""How the last orders ended, kept on the disk: an outcome that was not heard is told again, never worked for again.

The same order (kind, operation, attempt, what it is about) finds its outcome here, also after a kill -9. Heartbeats
list what ended in the last minutes.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

import msgspec

from corral.contract.codec import Message, Undecodable, always, decode, encode
from corral.contract.messages.backends import BackendResult
from corral.contract.messages.replicas import ReplicaResult
from corral.kit.clock import Clock
from corral.kit.files import write_atomically
from corral.kit.log import get_log
from corral.worker.agent.machine import in_daemon_thread

log = get_log(__name__)

KEEP = 256
FRESH_S = 600.0
LONGEST_ERROR = 4000


@dataclass(frozen=True)
class OrderKey:
    """Which order. One operation may concern several backends, and fetch first and switch later."""

    kind: str  # install, upgrade, delete, replica.start, replica.stop
    op_id: str
    attempt: int
    about: str  # the backend's name, or the process id


class Outcome(Message, frozen=True):
    """One of the two results is set."""

    kind: str = always(str)
    about: str = always(str)
    ended_at: float = always(float)  # seconds since the epoch
    backend: BackendResult | None = None
    replica: ReplicaResult | None = None

    @property
    def key(self) -> OrderKey:
        result = self.backend or self.replica
        assert result is not None
        return OrderKey(self.kind, result.op_id, result.attempt, self.about)


class _Written(Message, frozen=True):
    outcomes: tuple[Outcome, ...] = always(tuple)


class Outcomes:
    def __init__(self, path: Path, clock: Clock, *, keep: int = KEEP, fresh_s: float = FRESH_S) -> None:
        self._path = path
        self._clock = clock
        self._keep = keep
        self._fresh_s = fresh_s
        self._known: dict[OrderKey, Outcome] = {}
        self._writing = asyncio.Lock()

    def load(self) -> None:
        """Once, before anything else. What cannot be read costs an order or two that is carried out again."""
        try:
            written = decode(_Written, self._path.read_bytes())
        except FileNotFoundError:
            return
        except (OSError, Undecodable) as error:
            log.warning("the outcomes of earlier orders cannot be read", file=str(self._path), reason=str(error))
            return
        usable = [outcome for outcome in written.outcomes if (outcome.backend or outcome.replica) is not None]
        self._known = {outcome.key: outcome for outcome in usable[-self._keep :]}

    def find(self, key: OrderKey) -> Outcome | None:
        return self._known.get(key)

    def recent(self) -> tuple[Outcome, ...]:
        """Those of the last minutes, oldest first. A clock that was set back makes them young, not old."""
        since = self._clock.now().timestamp() - self._fresh_s
        return tuple(outcome for outcome in self._known.values() if outcome.ended_at >= since)

    def refused_for_libraries(self) -> tuple[Outcome, ...]:
        """Orders for backends that ended because the machine lacks a library, and were the last about theirs."""
        last = {outcome.about: outcome for outcome in self._known.values() if outcome.backend is not None}
        return tuple(outcome for outcome in last.values() if outcome.backend is not None and outcome.backend.missing)

    async def add(self, key: OrderKey, result: BackendResult | ReplicaResult) -> Outcome:
        """On the disk when this returns, unless the disk refuses: then it is known until the worker ends."""
        if len(result.error) > LONGEST_ERROR:
            # The end has the last lines of a process that failed, the beginning says what failed.
            half = LONGEST_ERROR // 2
            result = msgspec.structs.replace(result, error=f"{result.error[:half]} … {result.error[-half:]}")
        outcome = Outcome(
            kind=key.kind,
            about=key.about,
            ended_at=self._clock.now().timestamp(),
            backend=result if isinstance(result, BackendResult) else None,
            replica=result if isinstance(result, ReplicaResult) else None,
        )
        self._known.pop(key, None)
        self._known[key] = outcome
        while len(self._known) > self._keep:
            del self._known[next(iter(self._known))]
        async with self._writing:
            try:
                written = encode(_Written(tuple(self._known.values())))
                # A thread of its own: those of the pool may all be unpacking for a while.
                await in_daemon_thread(lambda: write_atomically(self._path, written, mode=0o600))
            except OSError as error:
                log.error("an outcome could not be written down", op=key.op_id, reason=str(error))
        return outcome
