"""Views of operations: the entry of a load whose files are on their way to a node."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from corral.contract.codec import encode
from corral.contract.loads import LoadState
from corral.controller.operations.views import staging_view
from corral.store.records import LoadJob

NOW = datetime(2026, 11, 15, 12, tzinfo=UTC)
MIB = 2**20


def job(**more: object) -> LoadJob:
    return LoadJob("org/m", LoadState.STAGING, NOW, NOW, node_id="id-barn", node_name="barn", **more)  # type: ignore[arg-type]


def test_a_load_is_listed_as_localai_lists_it() -> None:
    began = NOW - timedelta(seconds=2)
    view = staging_view(
        job(message="staging files on barn", bytes_sent=4 * MIB, total_bytes=16 * MIB, moving_since=began), NOW
    )
    assert (view.id, view.job_id, view.name, view.task_type) == ("staging:org/m", "staging:org/m", "org/m", "staging")
    assert (view.node_id, view.node_name, view.progress, view.cancellable) == ("id-barn", "barn", 25, False)
    assert (view.current_bytes, view.total_bytes, view.message) == (4 * MIB, 16 * MIB, "staging files on barn")
    (row,) = view.nodes
    assert (row.status, row.percentage, row.current, row.total) == ("downloading", 25.0, "4.0 MiB", "16.0 MiB")
    assert (row.rate, row.eta_s) == (2 * MIB, 6.0)
    assert b'"nodeName":"barn"' in encode(view)


def test_before_the_first_byte_nothing_is_guessed() -> None:
    (row,) = staging_view(job(), NOW).nodes
    assert (row.percentage, row.current, row.total, row.rate, row.eta_s) == (0.0, "", "", 0.0, 0.0)
