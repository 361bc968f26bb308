"""What gateways tell of the requests they served: stored and listed. What they lack is `demand.py`."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterable, Sequence
from datetime import datetime, timedelta

import msgspec

from corral.contract.receipts import MAX_ERROR_TEXT, Receipt, Receipts, RequestList, RequestView, parse_statuses
from corral.controller.gateways.demand import Demand
from corral.controller.runtime.node_views import rfc3339
from corral.kit.clock import Clock
from corral.kit.errors import Invalid
from corral.kit.log import get_log
from corral.store.engine.transactions import Store
from corral.store.tables import api_keys, receipts
from corral.store.tables.receipts import KeyUsage, NamedReceipt, ReceiptRow

log = get_log(__name__)

_NOTE_EVERY_S = 60.0
MAX_RECEIPTS = 10_000
_LOOK_AGAIN_S = 0.25
MAX_COUNTED = 100_000  # requests, where they are counted by key
_LONGEST = 512  # of a text in a receipt
_LARGEST = 2**53
_LATEST_S = 2.0**33
_NO_ERROR = ("", "")


class ReceiptService:
    def __init__(
        self,
        store: Store,
        clock: Clock,
        demand: Demand | None = None,
        on_stored: Callable[[Sequence[Receipt]], Awaitable[None]] | None = None,
    ) -> None:
        self._store = store
        self._demand = demand
        self._on_stored = on_stored
        self._clock = clock
        self._noted: dict[str, float] = {}  # keys, and when their use was written down
        self.dropped = 0  # receipts that gateways had no room for

    async def take(self, batch: Receipts) -> None:
        if self._demand is not None:
            await self._demand.take(batch)
        if batch.dropped:
            self.dropped += batch.dropped
            log.warning("a gateway had no room for receipts", dropped=batch.dropped)
        if batch.receipts:
            async with self._store.write() as tx:
                await receipts.insert(tx, rows_of(batch.receipts))
                for key_id in self._keys_to_note(batch):
                    await api_keys.note_use(tx, key_id)
            if self._on_stored is not None:
                await self._on_stored(batch.receipts)

    async def list_views(
        self,
        *,
        limit: int,
        failed: bool,
        model: str,
        key: str,
        node: str,
        since: datetime | None,
        before: str,
        status: str = "",
    ) -> RequestList:
        """`status`: as `parse_statuses` reads it; empty: any."""
        first_status, status_end = _read_statuses(status) if status else (None, None)
        place, place_id = _read_place(before) if before else (None, None)
        async with self._store.read() as tx:
            found = await receipts.list_(
                tx,
                limit=limit,
                failed=failed,
                status=first_status,
                status_end=status_end,
                model=model or None,
                key=key or None,
                node=node or None,
                since=since,
                before=place,
                before_id=place_id,
            )
        more = f"{found[-1].receipt.at.isoformat()}~{found[-1].receipt.id}" if len(found) == limit else ""
        return RequestList(tuple(_view(each) for each in found), more)

    async def find_own(self, request_id: str, key_id: str) -> RequestView | None:
        """Of one of the key's requests of the last hour: receipts are indexed by key and time, not by their ids."""
        since = self._clock.now() - timedelta(hours=1)
        async with self._store.read() as tx:
            found = await receipts.list_(tx, limit=1, id=request_id, key_id=key_id, since=since)
        return _own_view(found[0]) if found else None

    async def wait_own(self, request_id: str, key_id: str, *, wait_s: float) -> RequestView | None:
        """Gateways report a receipt within about a second of the end of its request."""
        deadline = self._clock.monotonic() + wait_s
        while (found := await self.find_own(request_id, key_id)) is None:
            left_s = deadline - self._clock.monotonic()
            if left_s <= 0:
                break
            await self._clock.sleep(min(left_s, _LOOK_AGAIN_S))
        return found

    async def find_at(self, request_id: str, at: datetime) -> RequestView | None:
        """`at` as views say it: to the millisecond."""
        until = at + timedelta(milliseconds=1)
        async with self._store.read() as tx:
            found = await receipts.list_(tx, limit=1, id=request_id, since=at, until=until)
        return _view(found[0]) if found else None

    async def list_own(self, key_id: str, *, limit: int) -> tuple[RequestView, ...]:
        """The newest requests of this key: by its id alone, as another key may have any name."""
        async with self._store.read() as tx:
            return tuple(_own_view(each) for each in await receipts.list_(tx, limit=limit, key_id=key_id))

    async def usage_by_key(self) -> dict[str, KeyUsage]:
        """Of the last day."""
        since = self._clock.now() - timedelta(days=1)
        async with self._store.read() as tx:
            return await receipts.usage_by_key(tx, since, limit=MAX_COUNTED)

    def _keys_to_note(self, batch: Receipts) -> list[str]:
        """Keys that were used, each at most once a minute: a note is a write, and users need no finer resolution."""
        now = self._clock.monotonic()
        used = sorted({receipt.key_id for receipt in batch.receipts})
        due = [key_id for key_id in used if now - self._noted.get(key_id, -_NOTE_EVERY_S) >= _NOTE_EVERY_S]
        if len(self._noted) > MAX_RECEIPTS:
            self._noted.clear()
        self._noted.update(dict.fromkeys(due, now))
        return due


def _read_place(text: str) -> tuple[datetime, str]:
    moment, mark, request_id = text.partition("~")
    at: datetime | None = None
    with contextlib.suppress(ValueError):
        at = datetime.fromisoformat(moment)
    if at is None or at.tzinfo is None or not mark:
        raise Invalid("before: use what `next` said")
    return at, request_id


def _read_statuses(text: str) -> tuple[int, int]:
    try:
        return parse_statuses(text)
    except ValueError as error:
        raise Invalid(str(error)) from error


def rows_of(reported: Iterable[Receipt]) -> list[ReceiptRow]:
    """As the store takes them: what a gateway says is made to fit, never refused."""
    # Most receipts of a batch differ in few texts: those that are the same in many are looked at once.
    seen: dict[tuple[str, ...], tuple[str, ...]] = {}
    return [_row(receipt, seen) for receipt in reported]


def _row(receipt: Receipt, seen: dict[tuple[str, ...], tuple[str, ...]]) -> ReceiptRow:
    texts = (
        receipt.key_id,
        receipt.model,
        receipt.path,
        receipt.served_by,
        receipt.node_id,
        receipt.process_id,
        receipt.revision,
        receipt.digest,
        receipt.ending,
    )
    clean = seen.get(texts)
    if clean is None:
        clean = seen[texts] = tuple(map(_text, texts))
    numbers: tuple[int, ...] = (
        receipt.status,
        receipt.replica,
        round(receipt.queue_ms * 1000) if receipt.queue_ms else 0,
        round(receipt.load_ms * 1000) if receipt.load_ms else 0,
        round(receipt.first_byte_ms * 1000) if receipt.first_byte_ms else 0,
        round(receipt.total_ms * 1000),
        receipt.prompt_tokens,
        receipt.completion_tokens,
        receipt.tries,
        receipt.resumed,
    )
    if min(numbers) < 0 or max(numbers) > _LARGEST:
        numbers = tuple(min(max(number, 0), _LARGEST) for number in numbers)
    at_us = round(min(max(receipt.at, 0.0), _LATEST_S) * 1_000_000)
    error = (_text(receipt.error), _text(receipt.error_text)[:MAX_ERROR_TEXT]) if receipt.error else _NO_ERROR
    return (at_us, _text(receipt.id), *clean, *numbers, receipt.estimated, receipt.streamed, *error)


def _text(value: str) -> str:
    # PostgreSQL takes no NUL in a text.
    return value[:_LONGEST].replace("\0", "")


def _view(named: NamedReceipt) -> RequestView:
    kept = named.receipt
    return RequestView(
        id=kept.id,
        at=rfc3339(kept.at),
        key_id=kept.key_id,
        key=named.key,
        model=kept.model,
        served_by=kept.served_by,
        path=kept.path,
        status=kept.status,
        node_id=kept.node_id,
        node=named.node,
        process_id=kept.process_id,
        replica=kept.replica,
        revision=kept.revision,
        digest=kept.digest,
        queue_ms=kept.queue_us / 1000,
        load_ms=kept.load_us / 1000,
        first_byte_ms=kept.first_byte_us / 1000,
        total_ms=kept.total_us / 1000,
        prompt_tokens=kept.prompt_tokens,
        completion_tokens=kept.completion_tokens,
        estimated=kept.estimated,
        streamed=kept.streamed,
        ending=kept.ending,
        tries=kept.tries,
        error=kept.error,
        error_text=kept.error_text,
        resumed=kept.resumed,
    )


def _own_view(named: NamedReceipt) -> RequestView:
    """For the key itself, which may belong to somebody outside: the text may name addresses of the fleet."""
    return msgspec.structs.replace(_view(named), error_text="")
