"""Provisions a replica before its node gets an order, in the background: the model's files on the controller, and the
backend on the node.

Each provisioner keeps the status of its work for the next pass of the reconciler, and retries work that failed for a
transient reason a limited number of times, with growing pauses: a database that is away for a moment, a commit with an
unknown outcome, a concurrent writer. `controller/files` fetches the files. A backend is requested by a rule for that
node, of origin `load`, so the install is retried, shown and withdrawn like one that a user requested.

`MemoryEstimator` estimates the memory of a model's processes from the sizes of its files and the GGUF headers of those
that this controller has. Headers are read once, in a thread; a file that is not here counts by its size.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from corral.blobs.progress import OnProgress, Progress
from corral.contract.gguf import GgufHeader, read_header
from corral.contract.messages.replicas import ReplicaFile
from corral.contract.models import Definition
from corral.controller.operations.accept import OperationAcceptor
from corral.controller.operations.requests import OperationKind, parse_request
from corral.controller.replicas.load_jobs import TransferProgress
from corral.controller.replicas.plan_input import FileStatus
from corral.controller.scheduler.memory import MeasuredUsage, estimate_memory
from corral.controller.scheduler.world import Memory
from corral.kit.clock import Clock
from corral.kit.errors import Conflict, CorralError, Invalid, OutcomeUnknown, Unavailable
from corral.kit.log import get_log
from corral.kit.retry import Backoff
from corral.kit.tasks import KeyedTasks
from corral.store.records import BackendRequest, RuleOrigin, Scope, ScopeKind
from corral.store.tables.model_files import StoredFile

log = get_log(__name__)
K = TypeVar("K", bound=Hashable)

MAX_HEADERS = 1000
MAX_ATTEMPTS = 8  # three quarters of a minute, with the pauses below
_TRANSIENT = (Unavailable, OutcomeUnknown, Conflict)


@dataclass
class _Failing:
    backoff: Backoff
    next_at: float


class RetryState(Generic[K]):
    def __init__(self, clock: Clock, *, first_s: float = 0.5, cap_s: float = 10.0) -> None:
        self._clock = clock
        self._first_s = first_s
        self._cap_s = cap_s
        self._failing: dict[K, _Failing] = {}

    def can_try(self, key: K) -> bool:
        """False during a pause."""
        failing = self._failing.get(key)
        return failing is None or failing.next_at <= self._clock.monotonic()

    def should_retry(self, key: K, error: CorralError) -> bool:
        """Record a failure. True: try again after the pause."""
        if not isinstance(error, _TRANSIENT):
            return False
        failing = self._failing.setdefault(key, _Failing(Backoff(self._first_s, self._cap_s), 0.0))
        failing.next_at = self._clock.monotonic() + failing.backoff.next_s()
        return failing.backoff.failures < MAX_ATTEMPTS

    def forget_all_but(self, keys: Collection[K]) -> None:
        self._failing = {key: failing for key, failing in self._failing.items() if key in keys}


class FileSource(Protocol):
    """The part of `controller/files` that replicas need."""

    async def ensure(self, definition: Definition, tell: OnProgress) -> tuple[ReplicaFile, ...]:
        """Fetch and verify all files of the model to the controller."""

    def find(self, key: str, /) -> Path | None:
        """The path of a file, where this controller has it: by its digest, or in a shared folder by its path."""

    def sources_for(self, node_id: str, files: Sequence[ReplicaFile] = ()) -> tuple[tuple[str, ...], str]:
        """The URLs from which a node fetches these files by digest, best first, and the token for them."""


class MemoryEstimator:
    def __init__(self, files: FileSource) -> None:
        self._files = files
        self._headers: dict[
            str, GgufHeader | None
        ] = {}  # by digest, or by path in a shared folder; None: no GGUF header

    def estimate(
        self, definition: Definition, stored: Sequence[StoredFile], measured: Sequence[MeasuredUsage] = ()
    ) -> Memory:
        sizes = [file.size_bytes for file in stored]
        if len(stored) < len(definition.files):  # not all are fetched yet: the declared sizes are all there is
            sizes = [file.size_bytes for file in definition.files]
        total = sum(sizes) if sizes and all(sizes) else 0
        headers = [header for file in stored if (header := self._headers.get(file.digest or file.path)) is not None]
        return estimate_memory(definition, total, header=headers[0] if headers else None, measured=measured)

    async def read_headers(self, files: Sequence[ReplicaFile]) -> None:
        """Read the headers of the files that this controller has and has not read yet."""
        for file in files:
            key = file.digest or file.path  # without a digest, it lies in the shared models folder
            if key not in self._headers:
                if len(self._headers) >= MAX_HEADERS:
                    self._headers.clear()
                self._headers[key] = await asyncio.to_thread(self._read, key)

    def _read(self, key: str) -> GgufHeader | None:
        path = self._files.find(key)
        if path is None:
            return None
        try:
            with path.open("rb") as file:
                return read_header(file)
        except Invalid:
            return None  # not GGUF, or not plausible: its size counts
        except OSError as error:
            log.warning("header of a model file cannot be read", file=key, error=str(error))
            return None


def _is_unfinished(status: FileStatus | None) -> bool:
    return status is None or (status.files is None and not status.error)


class FileProvisioner(KeyedTasks[tuple[str, str]]):
    """`async with` it. `on_change` is called when a status changed."""

    def __init__(
        self, files: FileSource, memory: MemoryEstimator, clock: Clock, *, on_change: Callable[[], None]
    ) -> None:
        super().__init__()
        self._files = files
        self._memory = memory
        self._on_change = on_change
        self._statuses: dict[tuple[str, str], FileStatus] = {}
        self._retries = RetryState[tuple[str, str]](clock)

    def statuses(self) -> dict[tuple[str, str], FileStatus]:
        """By model and revision."""
        return dict(self._statuses)

    def ensure(self, wanted: dict[tuple[str, str], Definition]) -> None:
        """Fetch the files of these models. Fetches for others are cancelled, and their failures forgotten."""
        for key in self.running():
            if key not in wanted:
                self.cancel(key)
        self._statuses = {key: status for key, status in self._statuses.items() if key in wanted}
        self._retries.forget_all_but(wanted)
        for key, definition in wanted.items():
            if _is_unfinished(self._statuses.get(key)) and self._retries.can_try(key):
                self.start(key, partial(self._fetch, key, definition), name=f"files of {definition.name}")

    async def _fetch(self, key: tuple[str, str], definition: Definition) -> None:
        def on_progress(progress: Progress) -> None:
            transfer = TransferProgress(
                bytes_sent=progress.current_bytes,
                total_bytes=progress.total_bytes,
                file_index=progress.file_index,
                total_files=progress.file_count,
                text=f"{progress.phase} {progress.file}".strip(),
            )
            self._statuses[key] = FileStatus(progress=transfer)

        try:
            files = await self._files.ensure(definition, on_progress)
            await self._memory.read_headers(files)  # before the plan learns of the files: placement depends on them
            self._statuses[key] = FileStatus(files=files)
        except CorralError as error:
            log.warning("files of a model could not be fetched", model=definition.name, error=error.message)
            if self._retries.should_retry(key, error):
                self._statuses[key] = FileStatus(progress=TransferProgress(text=f"will retry soon: {error.message}"))
            else:
                self._statuses[key] = FileStatus(error=f"its files could not be fetched: {error.message}")
        except asyncio.CancelledError:
            self._statuses.pop(key, None)
            raise
        except Exception:
            log.exception("files of a model could not be fetched", model=definition.name)
            self._statuses[key] = FileStatus(error="its files could not be fetched; see the controller's log")
        finally:
            self._on_change()


class BackendProvisioner(KeyedTasks[tuple[str, str]]):
    """`async with` it."""

    def __init__(self, acceptor: OperationAcceptor, clock: Clock, *, rule_shows_s: float = 10.0) -> None:
        """`rule_shows_s`: if no rule requires the backend by then, a user withdrew it."""
        super().__init__()
        self._acceptor = acceptor
        self._clock = clock
        self._rule_shows_s = rule_shows_s
        self._requested: dict[tuple[str, str], float] = {}
        self._retries = RetryState[tuple[str, str]](clock)
        self.refused: dict[tuple[str, str], str] = {}  # by node and backend: why the install was refused

    def ensure(self, lacking: set[tuple[str, str]]) -> None:
        """Request installs for these nodes and backends, which no rule requires yet."""
        self.refused = {key: why for key, why in self.refused.items() if key in lacking}
        self._requested = {key: at for key, at in self._requested.items() if key in lacking}
        self._retries.forget_all_but(lacking)
        for key in sorted(lacking):
            if key in self._requested:
                if self._clock.monotonic() - self._requested[key] > self._rule_shows_s:
                    self.refused[key] = "its install was withdrawn"
                continue
            if key not in self.refused and self._retries.can_try(key):
                self.start(key, partial(self._request, *key), name=f"install {key[1]}")

    async def _request(self, node_id: str, backend: str) -> None:
        try:
            request = parse_request(
                OperationKind.INSTALL,
                BackendRequest(backend),
                scope=Scope(ScopeKind.NODE, node_id),
                origin=RuleOrigin.LOAD,
            )
            accepted = await self._acceptor.accept(request)
            self._requested[(node_id, backend)] = self._clock.monotonic()
            log.info("backend requested", backend=backend, node_id=node_id, operation=accepted.operation_id)
        except CorralError as error:
            if not self._retries.should_retry((node_id, backend), error):
                self.refused[(node_id, backend)] = error.message
            log.warning("backend cannot be requested", backend=backend, node_id=node_id, error=error.message)
        except Exception:
            self.refused[(node_id, backend)] = "an internal error; see the controller's log"
            log.exception("backend cannot be requested", backend=backend, node_id=node_id)
