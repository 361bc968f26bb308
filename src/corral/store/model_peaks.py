"""The most memory a process of a model was ever seen to hold, by the revision of its definition: the next one is placed
by it. Rows go with their model; those of revisions that are long over are few and small."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from sqlalchemy import BigInteger, Column, ForeignKey, Table, Text, select

from corral.store.api import Transaction
from corral.store.schema import NameText, columns_of, insert_whole, metadata, records


class Peak(msgspec.Struct, frozen=True):
    model: str
    revision: str
    peak_bytes: int


table = Table(
    "model_peaks",
    metadata,
    Column("model", NameText, ForeignKey("models.id", ondelete="CASCADE"), primary_key=True),
    Column("revision", Text, primary_key=True),
    Column("peak_bytes", BigInteger, nullable=False),
)

_INSERT = insert_whole(table)
_RAISE = _INSERT.on_conflict_do_update(
    index_elements=[table.c.model, table.c.revision],
    set_={"peak_bytes": _INSERT.excluded.peak_bytes},
    where=_INSERT.excluded.peak_bytes > table.c.peak_bytes,
)
_ALL = select(table).order_by(table.c.model, table.c.revision)


async def raise_(tx: Transaction, peaks: Sequence[Peak]) -> None:
    """Never lower. Raises `Conflict` when a model is gone."""
    await tx.execute_many(_RAISE, [columns_of(peak) for peak in sorted(peaks, key=lambda peak: peak.model)])


async def list_(tx: Transaction) -> list[Peak]:
    return records(Peak, await tx.fetch_all(_ALL))
