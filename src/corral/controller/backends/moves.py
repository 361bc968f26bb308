"""Decides whether a switch waits until another node serves the models of the processes that have to end. Pure.

Without the memory for both versions the old processes end before the new ones start. A model that no other node serves
gets a replica elsewhere first: the row of the *due switch* asks for it, `controller/replicas` starts it or writes why
no node takes it, and the switch goes on. Nothing is kept in memory: each pass decides from the stored row.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from datetime import datetime, timedelta

from msgspec.structs import replace

from corral.contract.messages.replicas import ReplicaProcess, ReplicaState
from corral.controller.backends.plan import Step, Wait
from corral.controller.orders.order import Send
from corral.store.records import DueSwitch, OrderKind

# After this time the switch goes on, and the gateways hold the requests: fetching the files may take long elsewhere.
MAX_WAIT = timedelta(minutes=10)

_SWITCHES = (OrderKind.UPGRADE, OrderKind.INSTALL)


def models_of(processes: Iterable[ReplicaProcess]) -> tuple[str, ...]:
    """The models that lose a process."""
    return tuple(sorted({each.model for each in processes if each.model and each.state != ReplicaState.FAILED}))


def is_switch(step: Send) -> bool:
    """Whether it is a new order that replaces processes, if any run."""
    return step.kind in _SWITCHES and not step.again


def is_being_switched(step: Step) -> bool:
    """Whether the node may be ending processes for an order it has."""
    return isinstance(step, Wait | Send) and step.kind in _SWITCHES and getattr(step, "again", True)


def is_step_of(step: Step, due: DueSwitch) -> bool:
    """Whether the node carries out the switch that was due: its replicas are away for a moment, and none elsewhere must
    end before it is done."""
    return is_being_switched(step) and (step.backend, getattr(step, "operation", "")) == (due.backend, due.operation_id)


def mark_due(before: DueSwitch | None, node_id: str, step: Send, models: Sequence[str], now: datetime) -> DueSwitch:
    """The row to store. `before`: the stored one; `models`: those of the processes that have to end."""
    if before is None or before.operation_id != step.operation:
        return DueSwitch(node_id, step.backend, step.operation, now, tuple(models))
    return replace(before, models=tuple(sorted({*before.models, *models})))


def awaited(due: DueSwitch, lacking: Sequence[str], coming: Collection[str], now: datetime) -> tuple[str, ...]:
    """The models that the switch waits for; none: it goes on now. `coming`: another node that has the model switches at
    the moment, and will serve it again."""
    if now - due.since > MAX_WAIT:
        return ()
    return tuple(model for model in lacking if model not in due.refusals or model in coming)


def waits_text(models: Sequence[str]) -> str:
    names = ", ".join(models)
    minutes = round(MAX_WAIT.total_seconds() / 60)
    return f"waits until another node serves {names}, {minutes} minutes at most: memory does not hold both versions"
