"""How the last orders ended, stored on the disk: an outcome that did not arrive is reported again, and its order is not
carried out again.

The same order (kind, operation, attempt, target) finds its outcome here, also after a kill -9. Heartbeats list the
outcomes of the last minutes.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import msgspec

from corral.contract.codec import Message, Undecodable, always, decode, encode
from corral.contract.messages.backends import BackendResult
from corral.contract.messages.replicas import ReplicaResult
from corral.kit.clock import Clock
from corral.kit.files import write_atomically
from corral.kit.log import get_log
from corral.kit.threads import in_daemon_thread

log = get_log(__name__)

MAX_OUTCOMES = 256
FRESH_S = 600.0
MAX_ERROR_LENGTH = 4000

Result = BackendResult | ReplicaResult


class OrderKind(StrEnum):
    INSTALL = "install"
    UPGRADE = "upgrade"
    DELETE = "delete"
    START_REPLICA = "replica.start"
    STOP_REPLICA = "replica.stop"


BACKEND_ORDERS = frozenset({OrderKind.INSTALL, OrderKind.UPGRADE, OrderKind.DELETE})


@dataclass(frozen=True)
class OrderKey:
    """Names an order. One operation may concern several backends, and may fetch first and switch later."""

    kind: str  # an `OrderKind`
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
    def result(self) -> Result:
        result = self.backend or self.replica
        assert result is not None
        return result

    @property
    def key(self) -> OrderKey:
        return OrderKey(self.kind, self.result.op_id, self.result.attempt, self.about)


class _OutcomeFile(Message, frozen=True):
    outcomes: tuple[Outcome, ...] = always(tuple)


class Outcomes:
    def __init__(self, path: Path, clock: Clock, *, keep: int = MAX_OUTCOMES, fresh_s: float = FRESH_S) -> None:
        self._path = path
        self._clock = clock
        self._keep = keep
        self._fresh_s = fresh_s
        self._known: dict[OrderKey, Outcome] = {}
        self._writing = asyncio.Lock()

    def load(self) -> None:
        """Read the file, once, before any order. With an unreadable file a repeated order is carried out again."""
        try:
            written = decode(_OutcomeFile, self._path.read_bytes())
        except FileNotFoundError:
            return
        except (OSError, Undecodable) as error:
            log.warning("outcomes of earlier orders cannot be read", file=str(self._path), reason=str(error))
            return
        usable = [outcome for outcome in written.outcomes if (outcome.backend or outcome.replica) is not None]
        self._known = {outcome.key: outcome for outcome in usable[-self._keep :]}

    def find(self, key: OrderKey) -> Outcome | None:
        return self._known.get(key)

    def recent(self) -> tuple[Outcome, ...]:
        """Outcomes of the last minutes, oldest first. A clock that was set back makes them younger, not older."""
        since = self._clock.now().timestamp() - self._fresh_s
        return tuple(outcome for outcome in self._known.values() if outcome.ended_at >= since)

    def refused_for_libraries(self) -> tuple[Outcome, ...]:
        """Orders that failed because the machine lacks a library, where no later order concerned the same backend."""
        last = {outcome.about: outcome for outcome in self._known.values() if outcome.backend is not None}
        return tuple(outcome for outcome in last.values() if outcome.backend is not None and outcome.backend.missing)

    async def add(self, key: OrderKey, result: Result) -> Outcome:
        """Store an outcome. It is on the disk when this returns; if writing fails, the worker knows it until it
        ends."""
        if len(result.error) > MAX_ERROR_LENGTH:
            # The beginning says what failed, the end has the last lines of the process that failed.
            half = MAX_ERROR_LENGTH // 2
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
                written = encode(_OutcomeFile(tuple(self._known.values())))
                # Not a thread of the pool: unpacking may occupy all of those for minutes.
                await in_daemon_thread(lambda: write_atomically(self._path, written, mode=0o600))
            except OSError as error:
                log.error("outcome could not be written", op=key.op_id, reason=str(error))
        return outcome
