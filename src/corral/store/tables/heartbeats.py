"""Heartbeats: many nodes' numbers in one statement.

Written a batch a second, they must be cheap: 10,000 nodes every 10 s are 1,000 rows a second. One parameter carries the
whole batch as JSON, one UPDATE joins it. Written as text, because Core has no words for that join on both databases.

The rules are those of docs/reference/wire/nodes.md#http-heartbeat: the time is always stamped, by the database's clock;
absent values keep the last one; a free-VRAM figure is capped by the node's budget and ends soft reservations; of a
pending or offline node only the time is written; the status never changes. Neither do `row_version` and `updated_at`: a
heartbeat is not a change.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from corral.contract.hardware import Device
from corral.store.engine.transactions import Transaction


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """None keeps what is stored."""

    node_id: str
    boot_id: str | None = None
    available_vram: int | None = None
    total_vram: int | None = None
    available_ram: int | None = None
    total_ram: int | None = None
    available_disk: int | None = None
    total_disk: int | None = None
    gpu_vendor: str | None = None
    devices: tuple[Device, ...] | None = None
    bus_down: bool | None = None


_COLUMNS = {
    "boot_id": "text",
    "available_vram": "bigint",
    "total_vram": "bigint",
    "available_ram": "bigint",
    "total_ram": "bigint",
    "available_disk": "bigint",
    "total_disk": "bigint",
    "gpu_vendor": "text",
    "devices": "text",
    "bus_down": "boolean",
}
_SIZES = tuple(name for name, kind in _COLUMNS.items() if kind == "bigint")
_SPECIAL = {
    "boot_id": "COALESCE(NULLIF(beat.boot_id, ''), nodes.boot_id)",
    "available_vram": """CASE WHEN nodes.vram_budget_bytes > 0 AND nodes.vram_budget_bytes < beat.available_vram
                         THEN nodes.vram_budget_bytes ELSE COALESCE(beat.available_vram, nodes.available_vram) END""",
    "reserved_vram": "CASE WHEN beat.available_vram IS NULL THEN nodes.reserved_vram ELSE 0 END",
}
_TIME_ONLY = "nodes.status IN ('pending', 'offline')"
_AWAY = ("offline", "unhealthy")


def _assignments() -> str:
    values = {name: f"COALESCE(beat.{name}, nodes.{name})" for name in _COLUMNS} | _SPECIAL
    return ", ".join(
        f"{name} = CASE WHEN {_TIME_ONLY} THEN nodes.{name} ELSE {value} END" for name, value in values.items()
    )


_STATEMENTS = {
    "sqlite": f"""
        UPDATE nodes SET last_heartbeat = corral_now_us(), {_assignments()}
        FROM (SELECT json_extract(value, '$.node_id') AS node_id,
                     {", ".join(f"json_extract(value, '$.{name}') AS {name}" for name in _COLUMNS)}
              FROM json_each(:batch)) AS beat
        WHERE nodes.id = beat.node_id
        RETURNING status""",
    # Rows are locked in the order of their ids, so that two controllers' batches cannot lock each other out.
    "postgresql": f"""
        WITH beat AS (SELECT * FROM json_to_recordset(CAST(:batch AS json))
                      AS given(node_id text, {", ".join(f"{name} {kind}" for name, kind in _COLUMNS.items())})),
             locked AS (SELECT nodes.id FROM nodes JOIN beat ON beat.node_id = nodes.id
                        ORDER BY nodes.id FOR NO KEY UPDATE OF nodes)
        UPDATE nodes SET last_heartbeat = CAST(extract(epoch FROM clock_timestamp()) * 1000000 AS BIGINT),
                         {_assignments()}
        FROM beat JOIN locked ON locked.id = beat.node_id
        WHERE nodes.id = beat.node_id
        RETURNING nodes.status""",
}


async def record_heartbeats(tx: Transaction, beats: Iterable[Heartbeat]) -> int:
    """Write the last heartbeat of each node; unknown nodes are skipped. Returns how many of these nodes are marked
    offline or unhealthy: they are back, and the health monitor should run."""
    last = {beat.node_id: beat for beat in beats}
    if not last:
        return 0
    rows = await tx.fetch_all(_STATEMENTS[tx.kind], {"batch": _encoded(list(last.values()))})
    return sum(status in _AWAY for (status,) in rows)


def _encoded(beats: list[Heartbeat]) -> str:
    """One worker's nonsense must not keep the others' beats from being written: it is left out, its time stays."""
    kept = [_with_sane_sizes(beat) for beat in beats]
    text = msgspec.json.encode(kept)
    if b"\\u0000" in text:  # PostgreSQL cannot hold it
        kept = [beat if b"\\u0000" not in msgspec.json.encode(beat) else _time_only(beat) for beat in kept]
        text = msgspec.json.encode([beat for beat in kept if "\0" not in beat.node_id])
    return text.decode()


def _with_sane_sizes(beat: Heartbeat) -> Heartbeat:
    wrong = [name for name in _SIZES if not 0 <= (getattr(beat, name) or 0) < 2**63]
    return msgspec.structs.replace(beat, **dict.fromkeys(wrong)) if wrong else beat


def _time_only(beat: Heartbeat) -> Heartbeat:
    return Heartbeat(node_id=beat.node_id)
