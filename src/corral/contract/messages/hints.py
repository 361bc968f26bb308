"""Hints among controllers and gateways. Losing one costs at most one polling interval."""

from __future__ import annotations

from corral.contract.codec import Message, always
from corral.contract.subjects import event


class ViewChanged(Message, frozen=True):
    kind: str = always(str)  # nodes, keys, tokens
    id: str = ""
    row_version: int = 0


VIEW_CHANGED = event("corral.view.changed", ViewChanged)
# What only controllers care about (rules, operations, inventories) changes too often for gateways to be woken by it.
WORK_CHANGED = event("corral.work.changed", ViewChanged)
