"""What gateways tell of requests, made into rows: in the table's order, and within what both databases can hold."""

from __future__ import annotations

import msgspec
import pytest

from corral.contract.receipts import Receipt
from corral.controller.gateways.receipts import rows_of
from corral.store.engine.types import from_us
from corral.store.tables import receipts
from corral.store.tables.receipts import StoredReceipt


def stored(told: Receipt) -> StoredReceipt:
    at_us, *others = rows_of([told])[0]
    return StoredReceipt(from_us(at_us), *others)


def test_every_value_is_in_its_column() -> None:
    assert StoredReceipt.__struct_fields__ == tuple(column.name for column in receipts.table.columns)
    told = Receipt(
        id="r1",
        at=1_790_000_000.123456,
        key_id="k",
        model="m",
        path="/v1/chat/completions",
        status=503,
        served_by="other",
        node_id="n",
        process_id="p",
        replica=2,
        revision="rev",
        digest="sha256:a",
        queue_ms=1.5,
        load_ms=2.25,
        first_byte_ms=3.125,
        total_ms=250.0004,
        prompt_tokens=7,
        completion_tokens=5,
        estimated=True,
        streamed=False,
        ending="client_left",
        tries=3,
        error="upstream_failed",
        error_text="cannot connect",
    )
    kept = msgspec.structs.asdict(stored(told))
    spans_us = {"queue_us": 1500, "load_us": 2250, "first_byte_us": 3125, "total_us": 250_000}
    assert {name: kept.pop(name) for name in spans_us} == spans_us
    assert kept.pop("at").timestamp() == told.at
    assert kept == {name: getattr(told, name) for name in kept}


@pytest.mark.parametrize(
    ("field", "told", "kept_as", "kept"),
    [
        ("id", "a\0b", "id", "ab"),
        ("model", "m\0" + "x" * 600, "model", "m" + "x" * 510),
        ("ending", "e" * 513, "ending", "e" * 512),
        ("error_text", "t\0" + "x" * 300, "error_text", "t" + "x" * 199),
        ("status", -1, "status", 0),
        ("prompt_tokens", 2**63, "prompt_tokens", 2**53),
        ("total_ms", -0.5, "total_us", 0),
        ("load_ms", 1e30, "load_us", 2**53),
        ("at", -5.0, "at", from_us(0)),
        ("at", 1e300, "at", from_us(2**33 * 1_000_000)),
    ],
)
def test_what_does_not_fit_is_made_to_fit(field: str, told: object, kept_as: str, kept: object) -> None:
    assert getattr(stored(Receipt(**({"error": "e"} | {field: told}))), kept_as) == kept  # type: ignore[arg-type]


def test_one_that_has_to_be_made_to_fit_leaves_others_alone() -> None:
    rows = rows_of([Receipt(id="a", model="m\0"), Receipt(id="b", model="m"), Receipt(id="c", model="m\0")])
    assert [row[1] for row in rows] == ["a", "b", "c"]
    assert {row[3] for row in rows} == {"m"}
