"""One row for each process of this worker, and the views that other packages get of it."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from corral.contract.messages.replicas import ReplicaProcess, ReplicaState
from corral.kit.errors import CorralError
from corral.worker.supervisor.identity import has_ended
from corral.worker.supervisor.process import BackendProcess
from corral.worker.supervisor.readiness import Endpoint
from corral.worker.supervisor.spec import LOOPBACK, ProcessSpec
from corral.worker.supervisor.states import ProcessEvent, after


@dataclass(frozen=True)
class Running:
    """A process that serves, at the moment of asking."""

    process_id: str
    key: str
    model: str
    replica: int
    backend: str
    revision: str
    digest: str
    protocol: str
    port: int
    token: str = field(repr=False)
    slots: int = 1
    pid: int = 0
    directory: str = ""
    # Of a `grpc` process: what it was loaded with, and the model's definition.
    load: str = field(default="", repr=False)
    definition: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def address(self) -> str:
        return f"{LOOPBACK}:{self.port}"


@dataclass(frozen=True)
class Stopped:
    """The result of a stop. `terminated` False: the process was killed and still runs."""

    process_id: str
    key: str
    address: str
    freed: bool = False
    terminated: bool = True
    error: str = ""


@dataclass(eq=False)
class Entry:
    spec: ProcessSpec
    process_id: str
    token: str = field(repr=False)
    state: ReplicaState = ReplicaState.STARTING
    port: int = 0
    process: BackendProcess | None = None
    started_at: str = ""
    ready_at: str = ""
    ready_since: float = 0.0  # monotonic; 0: not yet
    restarts: int = 0
    failures: int = 0  # in a row
    error: str = ""
    peak_bytes: int = 0  # the most it was seen to hold in RAM
    device_peak_bytes: tuple[int, ...] = ()  # and on each of its devices
    # The result of the current attempt to start; each attempt has a new one.
    answer: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    leave: asyncio.Event = field(default_factory=asyncio.Event)  # set: stop the process
    hurry: asyncio.Event = field(default_factory=asyncio.Event)  # set: restart it now
    keeper: asyncio.Task[None] | None = None
    stopping: asyncio.Future[Stopped] | None = None
    moved: asyncio.Event = field(default_factory=asyncio.Event)  # set by the next step, which makes a new one
    _running: Running | None = None  # asked for by every request, so made once per state

    @property
    def key(self) -> str:
        return self.spec.key

    @property
    def backend(self) -> str:
        return self.spec.backend

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(self.port, self.token, self.spec.protocol, self.spec.manifest.ready.path)

    @property
    def address(self) -> str:
        return f"{LOOPBACK}:{self.port}" if self.port else ""

    @property
    def slots(self) -> int:
        return self.spec.slots or self.spec.manifest.slots

    def serves(self) -> bool:
        """Whether it is ready and still exists: its shim may not have reported yet that it was killed."""
        alive = self.process is not None and not self.process.ended.done() and not has_ended(self.process.identity)
        return self.state is ReplicaState.READY and alive

    def move(self, happened: ProcessEvent) -> bool:
        """Apply an event; False when the process leaves the table."""
        following = after(self.state, happened)
        self._running = None
        self.moved.set()
        self.moved = asyncio.Event()
        if following is not None:
            self.state = following
        return following is not None

    def record_peak(self, on_devices: tuple[int, ...]) -> None:
        """Record the memory on each device; the peak is kept."""
        if any(on_devices):
            before = self.device_peak_bytes or (0,) * len(on_devices)
            self.device_peak_bytes = tuple(map(max, before, on_devices))

    def answered(self) -> None:
        if not self.answer.done():
            self.answer.set_result(None)

    def failed(self, error: CorralError) -> None:
        self.error = error.message
        if not self.answer.done():
            self.answer.set_exception(error)
            self.answer.exception()  # retrieved, so that asyncio does not log it if nobody waits

    def running(self) -> Running:
        """The view of a process that serves; port and token do not change while it does."""
        if self._running is None:
            self._running = self._describe_running()
        return self._running

    def _describe_running(self) -> Running:
        spec = self.spec
        return Running(
            process_id=self.process_id,
            key=spec.key,
            model=spec.model,
            replica=spec.replica,
            backend=spec.backend,
            revision=spec.revision,
            digest=spec.digest,
            protocol=spec.protocol,
            port=self.port,
            token=self.token,
            slots=self.slots,
            pid=self.process.identity.pid if self.process is not None else 0,
            directory=spec.directory,
            load=spec.load,
            definition=spec.definition,
        )

    def report(self) -> ReplicaProcess:
        spec = self.spec
        return ReplicaProcess(
            process_id=self.process_id,
            model=spec.model,
            replica=spec.replica,
            backend=spec.backend,
            state=self.state.value,
            protocol=spec.protocol,
            revision=spec.revision,
            digest=spec.digest,
            slots=self.slots,
            devices=spec.devices,
            memory_bytes=spec.memory_bytes,
            peak_bytes=self.peak_bytes,
            device_peak_bytes=self.device_peak_bytes,
            started_at=self.started_at,
            ready_at=self.ready_at,
            restarts=self.restarts,
            error=self.error,
            continues=spec.manifest.continues,
        )


def new_token(spec: ProcessSpec) -> str:
    """A token for one process: it is valid for no other."""
    return spec.token or secrets.token_urlsafe(32)


class Table:
    """By process id. A key may have two rows while one process replaces another."""

    def __init__(self) -> None:
        self._rows: dict[str, Entry] = {}

    def __iter__(self) -> Iterator[Entry]:
        return iter(tuple(self._rows.values()))  # a snapshot: the table changes during awaits

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, entry: object) -> bool:
        return isinstance(entry, Entry) and self._rows.get(entry.process_id) is entry

    def add(self, entry: Entry) -> None:
        self._rows[entry.process_id] = entry

    def drop(self, entry: Entry) -> None:
        if entry in self:
            del self._rows[entry.process_id]

    def clear(self) -> None:
        self._rows.clear()

    def rename(self, entry: Entry, process_id: str) -> None:
        """Give a restarted process a new id and token: requests for the old process must not reach it."""
        self.drop(entry)
        entry.process_id = process_id
        entry.token = new_token(entry.spec)
        self.add(entry)

    def find(self, process_id: str) -> Entry | None:
        return self._rows.get(process_id)

    def of_key(self, key: str) -> list[Entry]:
        return [entry for entry in self._rows.values() if entry.key == key]

    def ready(self) -> Iterable[Entry]:
        return [entry for entry in self._rows.values() if entry.state is ReplicaState.READY]
