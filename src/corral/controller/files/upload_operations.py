"""The operations of uploads: files that users send to this controller, in pieces, as models or as bundles (ADR 52).

The controller that receives the pieces knows how far they are and publishes it; the row is stored like that of a fetch,
so every controller shows it and can cancel it. A piece of an operation that has ended is refused, which stops its
sender. A sender that disappears is noticed by its silence, by the controller that leads: also when the controller that
received the pieces was killed.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from corral.blobs.progress import RateMeter
from corral.blobs.upload import Uploads, UploadStatus
from corral.bus.api import Bus
from corral.contract.installs import OpenUpload, UploadOpened
from corral.contract.messages.backends import INSTALL_PROGRESS, InstallProgress
from corral.controller.operations import uploads as rows
from corral.controller.operations.file_operations import COUNTER, read_row
from corral.controller.operations.progress import ProgressCollector, write_rows
from corral.controller.operations.views import UPLOAD
from corral.controller.runtime.change_feed import RULES, ChangeFeed
from corral.controller.runtime.leadership import Leadership
from corral.kit.clock import Clock
from corral.kit.errors import Conflict, CorralError, Gone, Invalid, Unavailable
from corral.kit.humanize import format_bytes
from corral.kit.log import get_log
from corral.kit.tasks import run_every
from corral.store.engine.transactions import Store, Transaction
from corral.store.records import CONTROLLER, ENDED, OperationNode, UploadRequest
from corral.store.tables import operations, revisions
from corral.store.tables.operations import Operation

log = get_log(__name__)

MAX_FILES = 100_000
MAX_NAME = 255
MAX_COMMAND = 500
ALIVE_S = 10.0  # after a piece; then its sender counts as silent
_HEARTBEAT_S = 1.0  # of progress, while a piece is on its way
SILENT_S = 20.0  # without progress in the database
_SHA256 = re.compile(r"[0-9a-f]{64}\Z")
OnReceived = Callable[[int], None]


@dataclass
class _Transfer:
    """An operation whose pieces come to this controller."""

    name: str
    attempt: int
    sizes: dict[str, int]  # by digest
    received: dict[str, int]
    names: dict[str, str]
    is_bundle: bool  # then the upload ends when the bundle is loaded
    seen_at: float
    phase: str = rows.UPLOADING
    file_name: str = ""
    open_calls: int = 0
    seq: int = 0
    published_bytes: int = -1
    published_at: float = 0.0
    meter: RateMeter = field(default_factory=RateMeter)

    @property
    def current_bytes(self) -> int:
        return sum(self.received.values())

    @property
    def is_complete(self) -> bool:
        return self.received == self.sizes


class UploadOperations:
    name = "uploads"

    def __init__(
        self,
        store: Store,
        bus: Bus,
        progress: ProgressCollector,
        leadership: Leadership,
        feed: ChangeFeed,
        clock: Clock,
        *,
        lease: str,
        kept_s: float,
        silent_s: float = SILENT_S,
        alive_s: float = ALIVE_S,
        interval_s: float = 0.25,
    ) -> None:
        """`lease`: of the controller that notices silence. `kept_s`: how long an unfinished upload stays."""
        self._store = store
        self._bus = bus
        self._progress = progress
        self._leadership = leadership
        self._feed = feed
        self._clock = clock
        self._lease = lease
        self._kept_s = kept_s
        self._silent_s = silent_s
        self._alive_s = alive_s
        self._interval_s = interval_s
        self._transfers: dict[str, _Transfer] = {}
        self._expire_at = 0.0
        self._may_have_ended = False

    async def run(self) -> None:
        self._feed.on(COUNTER, self._on_change)
        await run_every(self.name, self._interval_s, self.run_once, clock=self._clock)

    def _on_change(self) -> None:
        self._may_have_ended = True

    async def run_once(self) -> None:
        now_s = self._clock.monotonic()
        for operation_id, transfer in list(self._transfers.items()):
            is_alive = transfer.open_calls or now_s - transfer.seen_at < self._alive_s
            is_new = transfer.current_bytes != transfer.published_bytes
            if is_alive and (is_new or now_s - transfer.published_at >= _HEARTBEAT_S):
                transfer.published_bytes, transfer.published_at = transfer.current_bytes, now_s
                await self._publish(operation_id, transfer)
        if self._transfers and self._may_have_ended:
            self._may_have_ended = False
            await self._forget_ended()
        if now_s >= self._expire_at and self._leadership.epoch(self._lease):
            self._expire_at = now_s + self._silent_s / 4
            await self._expire()

    async def _forget_ended(self) -> None:
        async with self._store.read() as tx:
            known = await operations.list_for(tx, sorted(self._transfers))
        for operation in known:
            if operation.finished_at is not None:
                self._transfers.pop(operation.id, None)

    async def _expire(self) -> None:
        async with self._store.read() as tx:
            if not await operations.list_open(tx, kind=UPLOAD):
                return
        async with self._store.write() as tx:
            await revisions.hold(tx, RULES)
            await self._leadership.require(tx, self._lease)
            changed = await rows.expire(tx, silent_s=self._silent_s, kept_s=self._kept_s)
        for operation_id in changed:
            log.info("upload stopped", operation=operation_id)
            self._feed.notify(COUNTER, operation_id)

    async def open(self, uploads: Uploads, request: OpenUpload, by: str) -> UploadOpened:
        """Begin or continue. Raises Gone where the sender's operation was cancelled meanwhile."""
        _check(request)
        if request.continues:
            async with self._store.read() as tx:
                await _refuse_cancelled(tx, request.continues)
        sizes = rows.sizes_of(request)
        received = {}
        for digest, size_bytes in sizes.items():
            status = await uploads.status(digest)
            received[digest] = size_bytes if status.complete else min(status.received_bytes, size_bytes - 1)
        current, total = sum(received.values()), sum(sizes.values())
        if received == sizes and not request.bundle:
            return UploadOpened(received_bytes=total, total_bytes=total)
        async with self._store.write() as tx:
            await revisions.hold(tx, RULES)
            operation, row = await rows.open_upload(tx, request, current, by)
        names = {f"sha256:{file.sha256}": file.name for file in request.files}
        self._transfers[operation.id] = _Transfer(
            request.name, row.attempt, sizes, received, names, bool(request.bundle), self._clock.monotonic()
        )
        self._feed.notify(COUNTER, operation.id)
        return UploadOpened(operation.id, current, total)

    @contextlib.asynccontextmanager
    async def piece(self, operation_id: str, digest: str) -> AsyncIterator[Callable[[UploadStatus], None]]:
        """Around one call of the sender; the yielded function takes what is here then. Without an operation, as old
        senders have none, nothing happens. Raises Gone for one that was cancelled, Conflict for one that this
        controller does not know: the sender opens it again."""
        if not operation_id:
            yield lambda _status: None
            return
        async with self._call(operation_id, rows.UPLOADING) as transfer:
            if digest not in transfer.sizes:
                raise Invalid("the operation has no such file")
            transfer.file_name = transfer.names[digest]

            def on_received(status: UploadStatus) -> None:
                whole = transfer.sizes[digest]
                transfer.received[digest] = whole if status.complete else min(status.received_bytes, whole)

            yield on_received
        if transfer.is_complete and not transfer.is_bundle:
            await self._end(operation_id)

    @contextlib.asynccontextmanager
    async def loading(self, operation_id: str) -> AsyncIterator[None]:
        """Around the last call for a bundle, which ends the operation."""
        if not operation_id:
            yield
            return
        async with self._call(operation_id, rows.LOADING):
            yield
        await self._end(operation_id)

    @contextlib.asynccontextmanager
    async def _call(self, operation_id: str, phase: str) -> AsyncIterator[_Transfer]:
        transfer = self._transfers.get(operation_id)
        if transfer is None:
            async with self._store.read() as tx:
                await _refuse_cancelled(tx, operation_id)
            raise Conflict("this controller does not know the upload: open it again, then continue")
        transfer.phase = phase
        transfer.open_calls += 1
        try:
            yield transfer
        except (Conflict, Unavailable):
            raise  # the sender tries again
        except CorralError as error:
            await self._fail(operation_id, error)
            raise
        finally:
            transfer.open_calls -= 1
            transfer.seen_at = self._clock.monotonic()

    async def _end(self, operation_id: str) -> None:
        await self._change(operation_id, lambda row, _upload: rows.done(row))
        self._transfers.pop(operation_id, None)

    async def _fail(self, operation_id: str, error: CorralError) -> None:
        with contextlib.suppress(CorralError):  # the sender gets the error itself
            await self._change(operation_id, lambda row, upload: rows.failed(row, upload, error.message))
        self._transfers.pop(operation_id, None)

    async def _change(self, operation_id: str, change: Callable[[OperationNode, UploadRequest], OperationNode]) -> None:
        async with self._store.write() as tx:
            await revisions.hold(tx, RULES)
            operation = await operations.get(tx, operation_id)
            stored = await read_row(tx, operation_id)
            if stored is None or stored.status in ENDED or operation.finished_at is not None:
                return
            (row,) = self._progress.merge(operation_id, [stored])
            await write_rows(tx, operation, [change(row, operation.request.upload or UploadRequest())])
        self._feed.notify(COUNTER, operation_id)

    async def _publish(self, operation_id: str, transfer: _Transfer) -> None:
        transfer.seq += 1
        current, total = transfer.current_bytes, sum(transfer.sizes.values())
        event = InstallProgress(
            op_id=operation_id,
            node_id=CONTROLLER,
            backend=transfer.name,
            file_name=transfer.file_name,
            current=format_bytes(current),
            total=format_bytes(total),
            percentage=100.0 * current / total,
            phase=transfer.phase,
            attempt=transfer.attempt,
            seq=transfer.seq,
            current_bytes=current,
            total_bytes=total,
            rate=transfer.meter.rate(current, self._clock.monotonic()),
        )
        await self._progress.on_progress(event, {"node": CONTROLLER})
        with contextlib.suppress(CorralError):  # without a bus other controllers read the stored row, once a second
            await self._bus.publish(INSTALL_PROGRESS, event, node=CONTROLLER, op=operation_id)


async def _refuse_cancelled(tx: Transaction, operation_id: str) -> None:
    operation = await operations.find(tx, operation_id)
    if operation is None or not _was_stopped(operation):
        return
    row = await read_row(tx, operation_id)
    step = rows.how_to_continue(
        operation.request.upload or UploadRequest(), row.current_bytes if row is not None else 0
    )
    raise Gone(f"operation {operation_id[:8]} was cancelled; to go on after all, {step}")


def _was_stopped(operation: Operation) -> bool:
    return operation.cancelled_at is not None or operation.withdrawn_at is not None


def _check(request: OpenUpload) -> None:
    """Raises Invalid."""
    texts = ((request.name, MAX_NAME), (request.command, MAX_COMMAND), (request.host, MAX_NAME))
    if not request.name or any(len(text) > limit or not text.isprintable() for text, limit in texts):
        raise Invalid(f"name, command and host are one line of text each, of at most {MAX_NAME} or {MAX_COMMAND} signs")
    if not 0 < len(request.files) <= MAX_FILES:
        raise Invalid(f"an upload has 1 to {MAX_FILES} files")
    for file in request.files:
        if not _SHA256.match(file.sha256) or not 0 < file.size_bytes < 2**53 or not file.name.isprintable():
            raise Invalid(f"{file.name!r} needs a SHA-256 in 64 hexadecimal digits, and a size")
