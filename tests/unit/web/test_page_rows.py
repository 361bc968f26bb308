from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from corral.contract.admin import NodeView
from corral.contract.hardware import Device
from corral.controller.web.rows import row_of

GIB = 1024**3
NOON = datetime(2026, 5, 4, 12, tzinfo=UTC)


def node(**more: Any) -> NodeView:
    return NodeView(**({"id": "1", "name": "barn", "status": "healthy"} | more))


def card(name: str = "RTX 4090") -> Device:
    return Device(index=0, vendor="nvidia", name=name, total_bytes=24 * GIB)


@pytest.mark.parametrize(
    ("more", "note"),
    [
        ({"status_reason": "registered"}, ""),
        ({"status": "pending", "ingress_error": "no answer"}, "waits for approval"),
        ({"ingress_error": "http://x does not answer", "bus_down": True}, "http://x does not answer"),
        ({"bus_down": True}, "cannot reach the bus: no new work"),
        ({"status": "offline", "status_reason": "no heartbeat"}, "no heartbeat"),
    ],
)
def test_the_one_thing_to_know(more: dict[str, Any], note: str) -> None:
    assert row_of(node(**more), NOON).note == note


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({}, "CPU only"),
        ({"total_vram": GIB, "gpu_vendor": "amd"}, "amd"),  # a LocalAI worker names no devices
        ({"total_vram": GIB}, "GPU"),
        ({"devices": (card(), card())}, "2 × RTX 4090"),
        ({"devices": (card(), card("T4"))}, "RTX 4090, T4"),
        ({"devices": (card(""),)}, "nvidia"),
    ],
)
def test_graphics_cards_in_words(more: dict[str, Any], words: str) -> None:
    assert row_of(node(**more), NOON).gpu == words


def test_vram_is_counted_against_the_budget() -> None:
    """Free VRAM is reported no higher than the budget, so the rest of the card must not look used."""
    row = row_of(node(total_vram=24 * GIB, vram_budget_bytes=12 * GIB, available_vram=9 * GIB), NOON)
    assert row.vram.words == "3 / 12 GiB"
    assert row_of(node(total_vram=24 * GIB, available_vram=9 * GIB), NOON).vram.words == "15 / 24 GiB"


def test_a_full_disk_is_marked_and_full_vram_is_not() -> None:
    row = row_of(
        node(total_disk=100, available_disk=10, total_ram=100, available_ram=11, total_vram=100, available_vram=0), NOON
    )
    assert (row.disk.full, row.ram.full, row.vram.full) == (True, False, False)


def test_what_is_not_reported_is_a_dash() -> None:
    row = row_of(node(), NOON)
    assert (row.ram.words, row.platform, row.version, row.seen) == ("–", "–", "–", "never")


def test_more_free_than_there_is_counts_as_none_used() -> None:
    assert row_of(node(total_ram=10, available_ram=12), NOON).ram.used == 0


def test_labels_in_order_and_the_rest_behind_a_number() -> None:
    row = row_of(node(labels={"d": "4", "b": "", "a": "1", "c": "3"}), NOON)
    assert row.labels == ("a=1", "b", "c=3")
    assert row.labels_more == ("d=4",)
