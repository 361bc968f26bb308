"""The largest memory use measured per process of a model, by revision of its definition: the next process is placed by
the last few measurements. Rows are deleted with their model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime

import msgspec
from sqlalchemy import BigInteger, Column, ForeignKey, Table, Text, bindparam, select
from sqlalchemy import delete as delete_from

from corral.store.engine.schema import NameText, columns_of, insert_whole, metadata, records
from corral.store.engine.transactions import Transaction
from corral.store.engine.types import Instant


class Peak(msgspec.Struct, frozen=True):
    model: str
    revision: str
    process_id: str
    seen_at: datetime  # for the first time: which ones are the last
    ram_bytes: int = 0  # 0: it does not live there
    device_bytes: int = 0  # on the one of its devices on which it held most; 0: not measured
    devices: int = 0  # over how many it was spread

    @property
    def key(self) -> tuple[str, str, str]:
        return (self.model, self.revision, self.process_id)


table = Table(
    "process_peaks",
    metadata,
    Column("model", NameText, ForeignKey("models.id", ondelete="CASCADE"), primary_key=True),
    Column("revision", Text, primary_key=True),
    Column("process_id", Text, primary_key=True),
    Column("seen_at", Instant, nullable=False),
    Column("ram_bytes", BigInteger, nullable=False),
    Column("device_bytes", BigInteger, nullable=False),
    Column("devices", BigInteger, nullable=False),
)

_INSERT = insert_whole(table)
_PUT = _INSERT.on_conflict_do_update(
    index_elements=[table.c.model, table.c.revision, table.c.process_id],
    set_={name: _INSERT.excluded[name] for name in ("ram_bytes", "device_bytes", "devices")},
)
_ALL = select(table).order_by(table.c.model, table.c.revision, table.c.seen_at, table.c.process_id)
_DELETE = delete_from(table).where(
    table.c.model == bindparam("of_model"),
    table.c.revision == bindparam("of_revision"),
    table.c.process_id == bindparam("of_process"),
)


async def put(tx: Transaction, peaks: Iterable[Peak]) -> None:
    """Raises `Conflict` when a model was deleted."""
    await tx.execute_many(_PUT, [columns_of(peak) for peak in sorted(peaks, key=lambda peak: peak.key)])


async def delete(tx: Transaction, peaks: Sequence[Peak]) -> None:
    rows = sorted(peak.key for peak in peaks)
    names = ("of_model", "of_revision", "of_process")
    await tx.execute_many(_DELETE, [dict(zip(names, key, strict=True)) for key in rows])


async def list_(tx: Transaction) -> list[Peak]:
    """By model and revision, the latest last."""
    return records(Peak, await tx.fetch_all(_ALL))
