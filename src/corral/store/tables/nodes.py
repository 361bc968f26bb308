"""The nodes: who they are, what they have, how they are. Heartbeats are written by `record_heartbeats`, in batches.

Every change but a heartbeat raises `row_version`; `update` writes only if the version is still the one that was read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import msgspec
from sqlalchemy import BigInteger, Boolean, Column, Integer, Table, Text, bindparam, func, select, text
from sqlalchemy import delete as delete_from
from sqlalchemy import update as update_table

from corral.contract.hardware import Device
from corral.kit.errors import NotFound
from corral.store.engine import claims
from corral.store.engine.schema import NameText, columns_of, insert_whole, metadata, record, records
from corral.store.engine.transactions import Transaction
from corral.store.engine.types import Instant, Json, among, now
from corral.store.tables import node_tombstones
from corral.store.tables.heartbeats import Heartbeat, record_heartbeats

__all__ = ["Heartbeat", "Node", "NodeOutline", "NodePulse", "record_heartbeats"]


class Node(msgspec.Struct, frozen=True):
    """Sizes are bytes; 0 = not reported."""

    id: str  # uuid4
    name: str
    created_at: datetime
    updated_at: datetime  # of the last change that raised `row_version`
    status_changed_at: datetime
    last_heartbeat: datetime | None = None
    row_version: int = 1
    node_type: str = "backend"  # backend, agent
    status: str = "pending"  # pending, healthy, unhealthy, offline, draining
    status_reason: str = ""
    approved: bool = False
    drained: bool = False  # by a person
    left: bool = False  # it said goodbye
    address: str = ""
    http_address: str = ""
    ingress_url: str = ""
    ingress_ok: bool | None = None  # None = not tried yet
    ingress_error: str = ""
    bus_down: bool = False
    protocol: int = 0  # 0 = a LocalAI worker
    auth: str = "token"  # token = its own; shared = the one all LocalAI workers show
    token_hash: str = ""
    enrolment_hash: str = ""
    boot_id: str = ""
    version: str = ""  # of corral on the worker
    os: str = ""
    arch: str = ""
    python: str = ""  # 3.11, of the interpreter that runs wheels; empty = it does not say
    backend_user: str = ""  # that backends run as; empty = it does not say
    backend_user_warning: str = ""
    backend_user_fix: str = ""
    gpu_vendor: str = ""
    gpu_compute_capability: str = ""
    capability: str = ""
    devices: tuple[Device, ...] = ()
    total_vram: int = 0
    available_vram: int = 0
    reserved_vram: int = 0
    total_ram: int = 0
    available_ram: int = 0
    total_disk: int = 0
    available_disk: int = 0
    max_replicas_per_model: int = 1
    max_replicas_per_model_manually_set: bool = False
    vram_budget: str = ""  # as it was written
    vram_budget_bytes: int = 0  # the ceiling it comes to on this node; 0 = none
    vram_budget_manually_set: bool = False

    @property
    def shares_token(self) -> bool:
        """A LocalAI worker that knows the token all of them share. One that joined with a token of its own and speaks
        the same protocol must never be shown that."""
        return self.protocol == 0 and self.auth == "shared"


class NodePulse(msgspec.Struct, frozen=True):
    """What judging a node's health takes, without the rest of its row."""

    id: str
    status: str
    status_changed_at: datetime
    last_heartbeat: datetime | None
    left: bool


class NodeHardware(msgspec.Struct, frozen=True):
    """What metrics show of a node, without the rest of its row."""

    name: str
    status: str
    total_ram: int
    available_ram: int
    total_disk: int
    available_disk: int
    devices: tuple[Device, ...]
    id: str = ""


class NodeOutline(msgspec.Struct, frozen=True):
    """What deciding about a node's backends takes, without the rest of its row."""

    id: str
    name: str
    node_type: str
    status: str
    approved: bool
    bus_down: bool
    protocol: int
    boot_id: str
    capability: str
    os: str
    arch: str
    python: str
    gpu_vendor: str
    gpu_compute_capability: str
    total_vram: int
    available_vram: int
    total_ram: int
    available_ram: int
    total_disk: int
    available_disk: int
    last_heartbeat: datetime | None

    @property
    def platform(self) -> str:
        return f"{self.os}/{self.arch}" if self.os else ""


def _size(name: str) -> Column[int]:
    return Column(name, BigInteger, nullable=False)


def _text(name: str, **options: Any) -> Column[str]:
    return Column(name, Text, nullable=False, **options)


def _flag(name: str, *, nullable: bool = False) -> Column[bool]:
    return Column(name, Boolean, nullable=nullable)


table = Table(
    "nodes",
    metadata,
    Column("id", Text, primary_key=True),
    Column("name", NameText, nullable=False, unique=True),
    Column("created_at", Instant, nullable=False),
    Column("updated_at", Instant, nullable=False),
    Column("status_changed_at", Instant, nullable=False),
    Column("last_heartbeat", Instant),
    Column("row_version", BigInteger, nullable=False),
    _text("node_type"),
    _text("status"),
    _text("status_reason"),
    _flag("approved"),
    _flag("drained"),
    _flag("left"),
    _text("address"),
    _text("http_address"),
    _text("ingress_url"),
    _flag("ingress_ok", nullable=True),
    _text("ingress_error"),
    _flag("bus_down"),
    Column("protocol", Integer, nullable=False),
    _text("auth"),
    _text("token_hash", index=True),
    _text("enrolment_hash"),
    _text("boot_id"),
    _text("version"),
    _text("os"),
    _text("arch"),
    _text("python", server_default=text("''")),  # for releases that do not know the column yet
    *(_text(name, server_default=text("''")) for name in ("backend_user", "backend_user_warning", "backend_user_fix")),
    _text("gpu_vendor"),
    _text("gpu_compute_capability"),
    _text("capability"),
    Column("devices", Json[tuple[Device, ...]](tuple[Device, ...]), nullable=False),
    _size("total_vram"),
    _size("available_vram"),
    _size("reserved_vram"),
    _size("total_ram"),
    _size("available_ram"),
    _size("total_disk"),
    _size("available_disk"),
    Column("max_replicas_per_model", Integer, nullable=False),
    _flag("max_replicas_per_model_manually_set"),
    _text("vram_budget"),
    _size("vram_budget_bytes"),
    _flag("vram_budget_manually_set"),
    # Room on each page, so that a heartbeat rewrites its row in place and no index is touched.
    postgresql_with={"fillfactor": "50"},
)

_INSERT = insert_whole(table)
_BY_ID = select(table).where(table.c.id == bindparam("id"))
_BY_NAME = select(table).where(table.c.name == bindparam("name"))
_BY_TOKEN = select(table).where(table.c.token_hash == bindparam("token_hash"))
_ALL = select(table).order_by(table.c.name)
_PAGE = _ALL.where(table.c.name > bindparam("after_name")).limit(bindparam("limit", type_=Integer))
_PULSES = select(*(table.c[name] for name in NodePulse.__struct_fields__)).order_by(table.c.name)
_UNAPPROVED = select(func.count()).select_from(table).where(table.c.approved.is_(False))
_HARDWARE = (
    select(*(table.c[name] for name in NodeHardware.__struct_fields__))
    .order_by(table.c.name)
    .limit(bindparam("limit", type_=Integer))
)
_NAMES = select(table.c.id, table.c.name)
_OUTLINES = select(*(table.c[name] for name in NodeOutline.__struct_fields__)).order_by(table.c.name)
_OUTLINES_OF = _OUTLINES.where(among(table.c.id, "node_ids"))
_CHANGED = select(table.c.id, table.c.row_version).where(table.c.updated_at > bindparam("since", type_=Instant()))
_CREDENTIALS = select(table.c.id, table.c.token_hash).where(table.c.approved.is_(True))
_SET_BOOT = (
    update_table(table)
    .where(table.c.id == bindparam("node_id"), table.c.boot_id != bindparam("told_boot_id"))
    .values(boot_id=bindparam("told_boot_id"))
)
_DELETE = delete_from(table).where(table.c.id == bindparam("id"))


async def insert(tx: Transaction, node: Node) -> None:
    """Raises `Conflict` when the name is taken."""
    await tx.execute(_INSERT, columns_of(node))


async def get(tx: Transaction, node_id: str) -> Node:
    """Raises `NotFound`. In a write transaction the row is ours until its end; so with every `find` below."""
    node = await find(tx, node_id)
    if node is None:
        raise NotFound(f"there is no node {node_id}")
    return node


async def find(tx: Transaction, node_id: str) -> Node | None:
    return record(Node, await tx.lock_one(_BY_ID, {"id": node_id}))


async def find_by_name(tx: Transaction, name: str) -> Node | None:
    return record(Node, await tx.lock_one(_BY_NAME, {"name": name}))


async def find_by_token_hash(tx: Transaction, token_hash: str) -> Node | None:
    if not token_hash:  # nodes without a token of their own have an empty hash, which must match no request
        return None
    return record(Node, await tx.lock_one(_BY_TOKEN, {"token_hash": token_hash}))


async def list_(tx: Transaction, *, limit: int | None = None, after_name: str | None = None) -> list[Node]:
    """In name order; with a limit one page, starting behind `after_name`. The cost is that of the page."""
    if limit is None and after_name is None:
        return records(Node, await tx.fetch_all(_ALL))
    wanted = {"after_name": after_name or "", "limit": 2**31 - 1 if limit is None else limit}
    return records(Node, await tx.fetch_all(_PAGE, wanted))


async def list_pulses(tx: Transaction) -> list[NodePulse]:
    return records(NodePulse, await tx.fetch_all(_PULSES))


async def list_hardware(tx: Transaction, *, limit: int) -> list[NodeHardware]:
    """The first ones by name."""
    return records(NodeHardware, await tx.fetch_all(_HARDWARE, {"limit": limit}))


async def list_names(tx: Transaction) -> dict[str, str]:
    """By id."""
    return {node_id: name for node_id, name in await tx.fetch_all(_NAMES)}


async def list_credentials(tx: Transaction) -> dict[str, str]:
    """The hash of its token, by node, of approved nodes; empty where it has none of its own."""
    return {node_id: token_hash for node_id, token_hash in await tx.fetch_all(_CREDENTIALS)}


async def count_unapproved(tx: Transaction) -> int:
    row = await tx.fetch_one(_UNAPPROVED)
    assert row is not None
    return int(row[0])


async def list_outlines(tx: Transaction, node_ids: Sequence[str] | None = None) -> list[NodeOutline]:
    """Of these nodes, or all; in name order."""
    if node_ids is None:
        return records(NodeOutline, await tx.fetch_all(_OUTLINES))
    return records(NodeOutline, await tx.fetch_all(_OUTLINES_OF, {"node_ids": node_ids}))


async def list_changed(tx: Transaction, since: datetime) -> dict[str, int]:
    """Nodes that changed after that, heartbeats apart, with their versions."""
    return {node_id: version for node_id, version in await tx.fetch_all(_CHANGED, {"since": since})}


async def set_boot_ids(tx: Transaction, boot_ids: Mapping[str, str]) -> None:
    """By node, as heartbeats tell them; like those, this is not a change of the nodes."""
    await tx.execute_many(_SET_BOOT, [{"node_id": id, "told_boot_id": boot} for id, boot in sorted(boot_ids.items())])


async def update(tx: Transaction, node_id: str, changes: Mapping[str, Any], *, expected: int) -> bool:
    """Write these columns and raise the version, if the version is still `expected`. False is ordinary: read again."""
    return await claims.compare_and_set(
        tx, table, {"id": node_id}, expected, {**changes, "updated_at": now()}, version="row_version"
    )


async def delete(tx: Transaction, node_id: str) -> bool:
    """The row and its labels go; a tombstone stays, so that the worker can be told. False = there was none."""
    node = await find(tx, node_id)
    if node is None:
        return False
    await node_tombstones.insert(tx, node.id, node.name, node.token_hash, node.enrolment_hash)
    await tx.execute(_DELETE, {"id": node_id})  # labels follow by their foreign key
    return True
