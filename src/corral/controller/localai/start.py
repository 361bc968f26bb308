"""One replica on a LocalAI worker, from the order to a process that answers
(docs/reference/wire/backends.md#loads-of-localai):

    what has its key ends ─▶ backend.install: an address ─▶ files there ─▶ LoadModel ─▶ on the list

A process is always a new one: what its worker keeps under the same key is of another revision, half loaded, or of a
controller that died, and nobody can tell which. What failed is ended, never left half loaded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import msgspec

from corral.blobs.progress import ignore_progress
from corral.contract.messages.backends import InstallProgress, Phase
from corral.contract.messages.replicas import ReplicaProgress, ReplicaState, StartReplica
from corral.contract.models import Definition
from corral.controller.files.model_files import ModelFiles
from corral.controller.localai.calls import PeerCalls
from corral.controller.localai.file_server import FileServerAddress
from corral.controller.localai.processes import process_key, reachable_address
from corral.controller.localai.staging import (
    PeerStaging,
    StagingProgress,
    list_shared,
    load_timeout_s,
    options_of,
    place_of,
)
from corral.controller.localai.table import NotLeading, PeerTable
from corral.controller.registry.ingress_client import IngressClient
from corral.inference.backend_process import ProcessHealth
from corral.inference.grpc.process_calls import check_health, load_model
from corral.kit.clock import Clock
from corral.kit.errors import CorralError, Failed, OutcomeUnknown, Unreachable
from corral.kit.log import get_log
from corral.store.tables.nodes import Node
from corral.store.tables.peer_processes import PeerProcess

log = get_log(__name__)

Tell = Callable[[ReplicaProgress], None]
_INSTALLS = 4  # of as long as one call may take
_LAST_LINES = 20
MAX_LOG_CHARS = 4000


@dataclass(frozen=True)
class StartTimes:
    pulse_s: float = 5.0
    reach_s: float = 15.0  # a process its worker says is ready, seen from here
    look_s: float = 0.5
    logs_s: float = 5.0
    clean_up_s: float = 30.0


class PeerStarter:
    def __init__(
        self,
        calls: PeerCalls,
        staging: PeerStaging,
        files: ModelFiles,
        table: PeerTable,
        logs: IngressClient,
        clock: Clock,
        token: str,
        times: StartTimes | None = None,
    ) -> None:
        """`token`: what all LocalAI workers share; their processes ask for it."""
        self._calls = calls
        self._staging = staging
        self._files = files
        self._table = table
        self._logs = logs
        self._clock = clock
        self._token = token
        self._times = times or StartTimes()

    async def start(self, node: Node, order: StartReplica, definition: Definition, tell: Tell) -> None:
        """Raises what kept it from coming about, after it was cleaned up."""
        progress, began_at = _ProgressReporter(order, tell), self._clock.now()
        if await self._calls.stop_key(node.id, order.model, order.replica, force=True) is False:
            raise Failed(f"a process that is still under {process_key(order.model, order.replica)} there does not end")
        address = ""
        try:
            address = await self._process(node, order, progress)
            load, size = await self._prepared(node, order, definition, progress)
            progress.say(Phase.STARTING)
            await self._load(node, order, address, load, size)
            now = self._clock.now()
            await self._table.put(
                PeerProcess(
                    process_id=order.process_id,
                    node_id=node.id,
                    model=order.model,
                    replica=order.replica,
                    revision=order.revision,
                    backend=order.backend,
                    address=address,
                    state=ReplicaState.READY.value,
                    load=load,
                    definition=order.definition,
                    started_at=began_at,
                    ready_at=now,
                    slots=definition.parallel or 1,
                    devices=order.devices,
                    memory_bytes=order.memory_bytes,
                )
            )
        except asyncio.CancelledError:
            await self._calls.tell_to_stop(node.id, order.model, order.replica)
            raise
        except NotLeading:
            raise  # the lease has gone to another controller, and the key with it: that one ends what it does not know
        except BaseException:
            if address:
                await self._clean_up(node, order, address)
            raise

    async def _process(self, node: Node, order: StartReplica, progress: _ProgressReporter) -> str:
        async with self._calls.progress(node.id, order.op_id, progress.installing):
            progress.say(Phase.STARTING)
            reported = await self._install(node, order)
        address = reachable_address(reported, node.address)
        for known in self._table.known().values():
            if (known.node_id, known.address) == (node.id, address) and known.key != (
                node.id,
                order.model,
                order.replica,
            ):
                raise Failed(f"its worker gave the process of {known.model} for that of {order.model}: is it too old?")
        until = self._clock.monotonic() + self._times.reach_s
        while await check_health(address, self._token, self._times.pulse_s) is ProcessHealth.UNREACHABLE:
            if self._clock.monotonic() >= until:
                await self._clean_up(node, order, address)
                raise Unreachable(f"its process at {address} cannot be reached from the controller")
            await self._clock.sleep(self._times.look_s)
        return address

    async def _install(self, node: Node, order: StartReplica) -> str:
        """A worker that has not answered is still fetching: asked again, it answers when that is done."""
        for _ in range(_INSTALLS - 1):
            try:
                return await self._calls.install(node.id, order.backend, order.model, order.replica, order.op_id)
            except OutcomeUnknown as error:
                log.info("its worker is still installing", node=node.name, backend=order.backend, error=error.message)
        return await self._calls.install(node.id, order.backend, order.model, order.replica, order.op_id)

    async def _prepared(
        self, node: Node, order: StartReplica, definition: Definition, progress: _ProgressReporter
    ) -> tuple[str, int]:
        """The options for LoadModel, and the size of the weights."""
        where = FileServerAddress(node.name, node.ingress_url)
        files = order.files
        if files:
            files = await self._files.ensure(
                definition, ignore_progress
            )  # another controller may have fetched them, and not this one
            if any(file.digest for file in files):
                staged = await self._staging.bring(node.id, where, files, progress.staging)
                depth = order.model.count("/") + 2  # <model>/<set>/…
            else:
                staged, depth = list_shared(files, self._files.find), 0
        else:
            staged = await self._staging.list_staged(where, order.definition) if where.url else ()
            depth = 0
        place = place_of(order.definition, staged, set_depth=depth)
        return options_of(order.definition, order.model, order.backend, place), sum(file.size_bytes for file in files)

    async def _load(self, node: Node, order: StartReplica, address: str, load: str, size_bytes: int) -> None:
        try:
            await load_model(address, self._token, load, load_timeout_s(size_bytes))
        except (Failed, Unreachable) as error:
            words = await self._last_words(node, process_key(order.model, order.replica))
            raise Failed(f"{order.backend} could not load the model: {error.message}{words}") from error

    async def _last_words(self, node: Node, key: str) -> str:
        """What the process wrote before it failed. None is no reason not to tell the rest."""
        try:
            async with asyncio.timeout(self._times.logs_s):
                reported = await self._logs.logs(node, f"/v1/backend-logs/{quote(key, safe='')}")
            lines = msgspec.json.decode(reported, type=list[dict[str, object]])
        except (CorralError, TimeoutError, msgspec.DecodeError):
            return ""
        texts = [str(line.get("text", "")) for line in lines if line.get("stream") == "stderr"][-_LAST_LINES:]
        return f"; its last lines:\n{chr(10).join(texts)[-MAX_LOG_CHARS:]}" if texts else ""

    async def _clean_up(self, node: Node, order: StartReplica, address: str) -> None:
        """Bounded, and best effort: the next start ends what is left."""
        try:
            async with asyncio.timeout(self._times.clean_up_s):
                await self._calls.stop_key(node.id, order.model, order.replica, address=address, force=True)
        except (CorralError, TimeoutError) as error:
            log.warning("a process that failed may still run", node=node.name, model=order.model, error=str(error))


class _ProgressReporter:
    """How far an order is, in the words of any worker's."""

    def __init__(self, order: StartReplica, tell: Tell) -> None:
        self._order = order
        self._tell = tell
        self._seq = 0

    def installing(self, event: InstallProgress) -> None:
        self.say(event.phase or Phase.DOWNLOADING, file=event.file_name)

    def staging(self, moving: StagingProgress) -> None:
        self.say(
            Phase.DOWNLOADING,
            file=moving.file,
            file_index=moving.file_index,
            total_files=moving.total_files,
            current_bytes=moving.current_bytes,
            total_bytes=moving.total_bytes,
        )

    def say(self, phase: str, **known: Any) -> None:
        self._seq += 1
        order = self._order
        self._tell(
            ReplicaProgress(
                op_id=order.op_id,
                attempt=order.attempt,
                seq=self._seq,
                process_id=order.process_id,
                phase=str(phase),
                **known,
            )
        )
