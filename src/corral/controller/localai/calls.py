"""Requests over the bus to a LocalAI worker about its processes
(docs/reference/wire/backends.md#loads-of-localai)."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from corral.bus.api import Bus, Tokens
from corral.contract.messages.backends import (
    INSTALL_BACKEND,
    INSTALL_PROGRESS,
    STOP_BACKEND,
    InstallBackend,
    InstallProgress,
    StopBackend,
)
from corral.contract.messages.files import (
    ENSURE_FILE,
    LIST_DIR,
    STAGE_FILE,
    EnsureFile,
    ListDir,
    LocalFile,
    StageFile,
)
from corral.contract.messages.models import (
    DELETE_MODEL,
    LIST_RUNNING_MODELS,
    STOP_MODEL,
    DeleteModel,
    ListRunningModels,
    RunningModel,
    StopModel,
)
from corral.controller.localai.processes import port_of, process_key
from corral.kit.clock import Clock
from corral.kit.errors import CorralError, Failed, OutcomeUnknown, Unreachable
from corral.kit.log import get_log
from corral.kit.retry import retry_unreachable
from corral.store.tables.peer_processes import PeerProcess

log = get_log(__name__)
T = TypeVar("T")
Key = tuple[str, int]  # model and replica
MAX_FILE_CALLS = 12  # of one file: two hours


@dataclass(frozen=True)
class PeerTimes:
    install_s: float = 900.0
    running_s: float = 10.0
    stop_s: float = 30.0  # Free 5 s, SIGTERM 15 s, SIGKILL
    delete_s: float = 30.0
    file_s: float = 600.0  # one file between the worker and the object storage
    list_s: float = 30.0
    second_try_s: float = 0.25  # after a call that no worker listened to
    gone_within_s: float = 30.0  # a process that was told to end
    unseen_s: float = 2.0  # the same, of a worker that does not say what runs
    look_s: float = 0.5


class PeerUnreachable(Unreachable):
    """Twice: the worker is not on the bus."""


class PeerCalls:
    def __init__(
        self, bus: Bus, clock: Clock, times: PeerTimes, *, galleries_with: Callable[[str], Awaitable[str]]
    ) -> None:
        """`galleries_with`: by backend, the gallery in which a worker finds it, as JSON."""
        self._bus = bus
        self._clock = clock
        self._galleries_with = galleries_with
        self.times = times

    @property
    def connected(self) -> bool:
        return self._bus.connected

    async def install(self, node_id: str, backend: str, model: str, replica: int, op_id: str) -> str:
        """The address of a process for the model; the backend is fetched first where it is not there. Raises Failed
        with the worker's words, PeerUnreachable, OutcomeUnknown."""
        request = InstallBackend(
            backend=backend,
            model_id=model,
            backend_galleries=await self._galleries_with(backend),
            replica_index=replica,
            op_id=op_id,
        )
        try:
            reply = await self._retried(
                lambda: self._bus.call(INSTALL_BACKEND, request, timeout_s=self.times.install_s, node=node_id)
            )
        except Unreachable as error:
            raise PeerUnreachable("nobody listens on the node") from error
        if not reply.success:
            raise Failed(reply.error or "its worker gave no reason")
        return reply.address

    @contextlib.asynccontextmanager
    async def progress(self, node_id: str, op_id: str, tell: Callable[[InstallProgress], None]) -> AsyncIterator[None]:
        """How far the fetching of the backend is, while the block runs."""

        async def on_progress(event: InstallProgress, _tokens: Tokens) -> None:
            tell(event)

        subscription = await self._bus.subscribe(INSTALL_PROGRESS, on_progress, node=node_id, op=op_id)
        try:
            yield
        finally:
            await subscription.unsubscribe()

    async def running(self, node_id: str) -> dict[Key, RunningModel] | None:
        """By model and replica, what lives and is not ending; None: the worker is too old to say, or not there. Raises
        what keeps it from answering."""
        request = ListRunningModels()
        try:
            reply = await self._retried(
                lambda: self._bus.call(LIST_RUNNING_MODELS, request, timeout_s=self.times.running_s, node=node_id)
            )
        except Unreachable:
            return None
        if reply.error:
            raise Failed(f"its worker cannot list what runs: {reply.error}")
        return {(row.model_id, row.replica_index): row for row in reply.models}

    async def stop(self, process: PeerProcess, *, force: bool = False) -> bool | None:
        """End exactly this process. Whether it is gone; None: its worker does not say."""
        return await self.stop_key(
            process.node_id,
            process.model,
            process.replica,
            address=process.address,
            revision=process.revision,
            force=force,
        )

    async def stop_key(
        self, node_id: str, model: str, replica: int, *, address: str = "", revision: str = "", force: bool = False
    ) -> bool | None:
        """End the process that has this key; with `address` only if it is the one there. Whether it is gone; None: its
        worker is too old to say."""
        running = await self.running(node_id)
        found = running.get((model, replica)) if running is not None else None
        if running is not None and found is None:
            return True
        if found is not None and address and found.address and port_of(found.address) != port_of(address):
            return True  # another has its key by now: that one is not ours to end
        key = process_key(model, replica)
        if found is None or not await self._stopped(node_id, model, key, found.address, revision, force):
            # Unacknowledged, and all that a worker from before `model.stop` understands.
            await self._bus.publish(STOP_BACKEND, StopBackend(backend=key, force=force), node=node_id)
        return await self._gone(node_id, (model, replica))

    async def tell_to_stop(self, node_id: str, model: str, replica: int) -> None:
        """At once, and nobody waits: what a load that is given up leaves behind
        (docs/reference/wire/backends.md#loads-of-localai)."""
        try:
            await self._bus.publish(
                STOP_BACKEND, StopBackend(backend=process_key(model, replica), force=True), node=node_id
            )
        except CorralError as error:
            log.warning("a process may go on loading", node_id=node_id, model=model, error=error.message)

    async def _stopped(self, node_id: str, model: str, key: str, address: str, revision: str, force: bool) -> bool:
        """Whether the worker knows how to end exactly one. It compares with its own, local address."""
        request = StopModel(
            model_name=model, process_key=key, expected_address=address, force=force, config_revision=revision
        )
        try:
            reply = await self._bus.call(STOP_MODEL, request, timeout_s=self.times.stop_s, node=node_id)
        except Unreachable:
            return False
        except OutcomeUnknown:
            return True  # it is at it
        if not reply.terminated:
            log.warning("a process could not be ended", node_id=node_id, process=key, error=reply.error)
        return True

    async def _gone(self, node_id: str, key: Key) -> bool | None:
        until = self._clock.monotonic() + self.times.gone_within_s
        while True:
            running = await self.running(node_id)
            if running is None:
                await self._clock.sleep(self.times.unseen_s)
                return None
            if key not in running:
                return True
            if self._clock.monotonic() >= until:
                return False
            await self._clock.sleep(self.times.look_s)

    async def delete_folder(self, node_id: str, folder: str) -> None:
        """A folder below the worker's models folder, with all that is in it. Raises what keeps it from going."""
        request = DeleteModel(model_name=folder)
        reply = await self._retried(
            lambda: self._bus.call(DELETE_MODEL, request, timeout_s=self.times.delete_s, node=node_id)
        )
        if not reply.success:
            raise Failed(reply.error or "its worker gave no reason")

    async def ensure_file(self, node_id: str, key: str) -> str:
        """The worker's path of an object, which it fetches where it does not have it. A worker that has not answered is
        still fetching: called again, it answers when that is done. Raises Failed with the worker's reason,
        Unreachable if it has no object storage, OutcomeUnknown."""
        for _ in range(MAX_FILE_CALLS - 1):
            try:
                reply = await self._call_ensure(node_id, key)
                break
            except OutcomeUnknown as error:
                log.info("the worker is still fetching", node_id=node_id, key=key, error=error.message)
        else:
            reply = await self._call_ensure(node_id, key)
        if reply.error or not reply.local_path:
            raise Failed(reply.error or f"its worker does not say where {key} is")
        return reply.local_path

    async def _call_ensure(self, node_id: str, key: str) -> LocalFile:
        request = EnsureFile(key=key)
        return await self._retried(
            lambda: self._bus.call(ENSURE_FILE, request, timeout_s=self.times.file_s, node=node_id)
        )

    async def stage_file(self, node_id: str, path: str, key: str) -> None:
        """The worker uploads a file of its own as an object. Raises Failed with the worker's reason, Unreachable,
        OutcomeUnknown."""
        request = StageFile(local_path=path, key=key)
        reply = await self._retried(
            lambda: self._bus.call(STAGE_FILE, request, timeout_s=self.times.file_s, node=node_id)
        )
        if reply.error:
            raise Failed(reply.error)

    async def list_files(self, node_id: str, prefix: str) -> tuple[str, ...]:
        request = ListDir(key_prefix=prefix)
        reply = await self._retried(
            lambda: self._bus.call(LIST_DIR, request, timeout_s=self.times.list_s, node=node_id)
        )
        if reply.error:
            raise Failed(reply.error)
        return tuple(reply.files)

    async def _retried(self, call: Callable[[], Awaitable[T]]) -> T:
        return await retry_unreachable(call, clock=self._clock, after_s=self.times.second_try_s)
