"""Rows that tests put in."""

from __future__ import annotations

import itertools
import uuid
from datetime import UTC, datetime
from typing import Any

from corral.store.nodes import Node

NOON = datetime(2026, 3, 4, 12, 0, 0, 123456, tzinfo=UTC)
_numbers = itertools.count(1)


def a_node(**known: Any) -> Node:
    defaults: dict[str, Any] = {
        "id": str(uuid.uuid4()),
        "name": f"node-{next(_numbers)}",
        "created_at": NOON,
        "updated_at": NOON,
        "status_changed_at": NOON,
        "status": "healthy",
    }
    return Node(**(defaults | known))
