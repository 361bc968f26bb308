"""A model an earlier release took and this one cannot mean: people are told, and not twice a second."""

from __future__ import annotations

from datetime import UTC, datetime

from structlog.testing import capture_logs

from corral.controller.models.views import definition_of, view_models
from corral.store.tables.models import StoredModel

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def test_it_is_told_once_for_each_revision() -> None:
    with capture_logs() as told:
        for revision in ("r1", "r1", "r2", "r2"):
            odd = StoredModel(
                id="odd",
                definition={"name": "odd", "backend": "not a name"},
                revision=revision,
                origin="person",
                created_at=NOW,
                updated_at=NOW,
            )
            assert definition_of(odd) is None
            view_models([odd], {})
    assert [line["model"] for line in told] == ["odd", "odd"]
    assert all("backend 'not a name'" in line["error"] for line in told)
