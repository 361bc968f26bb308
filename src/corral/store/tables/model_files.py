"""What the files of models turned out to be, the first time they were fetched. From then on a model means these bytes,
whatever its sources hold by now: every replica of one revision reads the same weights.

Rows go with their model. Where the bytes are is no matter of the database's: each controller has files of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

import msgspec
from sqlalchemy import BigInteger, Column, ForeignKey, Table, Text, bindparam, select
from sqlalchemy import delete as delete_from

from corral.store.engine.schema import NameText, columns_of, insert_whole, metadata, records
from corral.store.engine.transactions import Transaction
from corral.store.engine.types import EPOCH, Instant, among, now


class StoredFile(msgspec.Struct, frozen=True):
    model: str
    path: str  # as the definition names it
    uri: str  # as the definition names it
    resolved: str  # what that meant: with the version, or the commit
    digest: str  # sha256:…
    size_bytes: int
    fetched_at: datetime = EPOCH  # the database's; `put` writes it

    @property
    def is_list(self) -> bool:
        """Of what is in a repository: a note of ours, and no file of the model."""
        return self.path.endswith("/")


table = Table(
    "model_files",
    metadata,
    Column("model", NameText, ForeignKey("models.id", ondelete="CASCADE"), primary_key=True),
    Column("path", NameText, primary_key=True),
    Column("uri", Text, nullable=False),
    Column("resolved", Text, nullable=False),
    Column("digest", Text, nullable=False),
    Column("size_bytes", BigInteger, nullable=False),
    Column("fetched_at", Instant, nullable=False),
)

_INSERT = insert_whole(table).values(fetched_at=now())
_PUT = _INSERT.on_conflict_do_update(
    index_elements=[table.c.model, table.c.path],
    set_={name: _INSERT.excluded[name] for name in ("uri", "resolved", "digest", "size_bytes", "fetched_at")},
)
_ALL = select(table).order_by(table.c.model, table.c.path)
_DELETE = delete_from(table).where(table.c.model == bindparam("model"), table.c.path == bindparam("path"))
_OF = _ALL.where(table.c.model == bindparam("model"))
_OF_THESE = _ALL.where(among(table.c.model, "models"))
_BY_DIGEST = _ALL.where(table.c.digest == bindparam("digest"))
_DIGESTS = select(table.c.digest).distinct()


async def put(tx: Transaction, file: StoredFile) -> None:
    """The time is the database's. Raises `Conflict` when the model was deleted."""
    await tx.execute(_PUT, {name: value for name, value in columns_of(file).items() if name != "fetched_at"})


async def delete(tx: Transaction, model: str, path: str) -> bool:
    """The model has no such file any more."""
    return (await tx.execute(_DELETE, {"model": model, "path": path})).rowcount == 1


async def list_(tx: Transaction, models: Sequence[str] | None = None) -> list[StoredFile]:
    if models is None:
        return records(StoredFile, await tx.fetch_all(_ALL))
    return records(StoredFile, await tx.fetch_all(_OF_THESE, {"models": models}))


async def list_of(tx: Transaction, model: str) -> list[StoredFile]:
    return records(StoredFile, await tx.fetch_all(_OF, {"model": model}))


async def list_by_digest(tx: Transaction, digest: str) -> list[StoredFile]:
    """Every model that has this very file."""
    return records(StoredFile, await tx.fetch_all(_BY_DIGEST, {"digest": digest}))


async def list_digests(tx: Transaction) -> list[str]:
    """Of all files any model needs."""
    return [digest for (digest,) in await tx.fetch_all(_DIGESTS)]
