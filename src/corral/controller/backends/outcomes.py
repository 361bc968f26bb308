"""The state transitions of an intent: sent, accepted, failed, done. Pure: `plan.py` decides when, `reconcile.py`
acts."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import assert_never

from msgspec.structs import replace

from corral.contract.messages.backends import BackendResult, Phase
from corral.controller.backends.plan import Done, NodeWorld
from corral.controller.orders.observations import (
    Observation,
    OrderAccepted,
    OrderEnded,
    OrderNotRunning,
    OrderNotSent,
    OrderStillRunning,
    OrderUnconfirmed,
    WorkerUnreachable,
)
from corral.controller.orders.order import OrderId, Send
from corral.store.records import BackendIntent, IntentStage, OrderKind

ASK_AGAIN = timedelta(seconds=5)  # after an order whose acceptance was not confirmed
STILL_RUNNING = "no reply yet: the worker is still working on it"
NOT_SENT_WAIT = timedelta(seconds=2)  # after the controller itself could not send an order
_BEFORE_THE_SWITCH = frozenset({Phase.RESOLVING, Phase.DOWNLOADING, Phase.VERIFYING, Phase.EXTRACTING})


@dataclass(frozen=True)
class RetryPolicy:
    """The pauses between attempts: they double up to `last`, and attempts never end."""

    first: timedelta = timedelta(seconds=30)
    last: timedelta = timedelta(minutes=15)

    def delay(self, failures: int) -> timedelta:
        return min(self.last, self.first * (1 << min(max(failures, 1) - 1, 20)))


DEFAULT_RETRY = RetryPolicy()


def claim(
    node_id: str,
    before: BackendIntent | None,
    send: Send,
    now: datetime,
    *,
    epoch: int,
    answer_by: datetime | None,
    boot_id: str = "",
) -> BackendIntent:
    """The order is about to be sent. `answer_by`: until when a LocalAI worker has time to carry it out."""
    same_rule = before is not None and before.generation == send.generation
    switching = before is not None and before.kind is OrderKind.FETCH and send.kind is not OrderKind.FETCH
    return BackendIntent(
        node_id=node_id,
        backend=send.backend,
        kind=send.kind,
        stage=IntentStage.SENT,
        generation=send.generation,
        operation_id=send.operation,
        attempt=send.attempt,
        variant=send.build.variant if send.build else "",
        digest=send.build.digest if send.build else "",
        failures=before.failures if before is not None and same_rule and not switching else 0,
        next_try_at=answer_by,
        updated_at=now,
        epoch=epoch,
        sent_at=now,
        boot_id=boot_id,
        before=before.before if before is not None and send.again else send.before,
        # Until it has succeeded: the rest of the rollout waits for that, also while this order runs.
        switch_failed=before is not None and same_rule and before.switch_failed,
    )


def accepted(intent: BackendIntent, boot_id: str, now: datetime) -> BackendIntent:
    return replace(intent, accepted_at=now, boot_id=boot_id, next_try_at=None, running=False, updated_at=now)


def unsure(intent: BackendIntent, now: datetime) -> BackendIntent:
    """The worker did not confirm the order: the same order will be sent again."""
    return replace(intent, next_try_at=now + ASK_AGAIN, updated_at=now)


def still_running(intent: BackendIntent, now: datetime, timeout: timedelta) -> BackendIntent:
    """A LocalAI worker did not reply in time. That is no failure: it most likely still works on the order."""
    return replace(intent, running=True, reason=STILL_RUNNING, next_try_at=now + timeout, updated_at=now)


def answered(intent: BackendIntent, now: datetime) -> BackendIntent:
    """The worker reported success; the inventory has to prove it."""
    return replace(intent, answered=True, updated_at=now)


def failed(
    intent: BackendIntent,
    reason: str,
    now: datetime,
    *,
    permanent: bool = False,
    switch_failed: bool = False,
    retry: RetryPolicy = DEFAULT_RETRY,
) -> BackendIntent:
    failures = intent.failures + 1
    return replace(
        intent,
        stage=IntentStage.PARKED if permanent else IntentStage.WAITING,
        failures=failures,
        reason=reason,
        next_try_at=None if permanent else now + retry.delay(failures),
        running=False,
        answered=False,
        accepted_at=None,
        switch_failed=switch_failed or intent.switch_failed,
        updated_at=now,
    )


def not_sent(intent: BackendIntent, reason: str, now: datetime, wait: timedelta) -> BackendIntent:
    """The controller could not send the order; the node had no part in that."""
    return replace(intent, stage=IntentStage.WAITING, reason=reason, next_try_at=now + wait, updated_at=now)


def ended(
    intent: BackendIntent, result: OrderEnded, now: datetime, retry: RetryPolicy = DEFAULT_RETRY
) -> BackendIntent:
    """A worker reported the end of the order."""
    if result.success:
        return answered(intent, now)
    if result.cancelled:  # by this controller; if a rule still requires it, a new order is sent
        return replace(
            intent, stage=IntentStage.WAITING, reason="cancelled", next_try_at=None, accepted_at=None, updated_at=now
        )
    switching = intent.kind is not OrderKind.FETCH and result.phase not in _BEFORE_THE_SWITCH
    reason = result.error or "the node gave no reason"
    return failed(intent, reason, now, permanent=result.permanent, switch_failed=switching, retry=retry)


def done(node_id: str, before: BackendIntent | None, step: Done, now: datetime) -> BackendIntent:
    return BackendIntent(
        node_id=node_id,
        backend=step.backend,
        kind=before.kind if before is not None and before.stage is IntentStage.SENT else step.kind,
        stage=IntentStage.DONE,
        generation=step.generation,
        operation_id=step.operation,
        attempt=before.attempt if before is not None else 0,
        updated_at=now,
        variant=before.variant if before is not None else "",
        digest=step.digest,
    )


def dropped(intent: BackendIntent, now: datetime) -> BackendIntent:
    """The row is kept: the numbers of its attempts must not start over."""
    return BackendIntent(
        node_id=intent.node_id,
        backend=intent.backend,
        kind=intent.kind,
        stage=IntentStage.IDLE,
        generation=intent.generation,
        operation_id=intent.operation_id,
        attempt=intent.attempt,
        updated_at=now,
    )


def over(intent: BackendIntent, now: datetime) -> BackendIntent:
    """The worker does not know the order, or no longer: it does not run."""
    return replace(intent, stage=IntentStage.WAITING, next_try_at=None, accepted_at=None, running=False, updated_at=now)


def catch_up(
    node: NodeWorld, results: dict[tuple[str, int], BackendResult], now: datetime, retry: RetryPolicy = DEFAULT_RETRY
) -> dict[str, BackendIntent]:
    """The intents whose outcome the node's last heartbeat lists: their result events were lost."""
    found = {}
    for backend, intent in node.intents.items():
        result = results.get((intent.operation_id, intent.attempt))
        if (
            intent.stage is IntentStage.SENT
            and not intent.answered
            and result is not None
            and result.backend == backend
        ):
            order = OrderId(node.id, intent.operation_id, intent.attempt, backend)
            found[backend] = ended(intent, OrderEnded.from_result(order, result), now, retry)
    return found


def apply(
    intent: BackendIntent, observation: Observation, now: datetime, retry: RetryPolicy = DEFAULT_RETRY
) -> BackendIntent:
    """The intent after the observation. An observation about an order that is no longer the last one changes
    nothing."""
    order = observation.order
    if intent.stage is not IntentStage.SENT or (intent.operation_id, intent.attempt) != (
        order.operation,
        order.attempt,
    ):
        return intent
    match observation:
        case OrderAccepted(boot_id=boot_id):
            return accepted(intent, boot_id, now)
        case OrderUnconfirmed():
            return unsure(intent, now)
        case OrderStillRunning(timeout_s=timeout_s):
            return still_running(intent, now, timedelta(seconds=timeout_s))
        case OrderEnded():
            return ended(intent, observation, now, retry)
        case WorkerUnreachable(reason=reason):
            return failed(intent, reason, now, retry=retry)
        case OrderNotSent(reason=reason):
            return not_sent(intent, reason, now, NOT_SENT_WAIT)
        case OrderNotRunning():
            return over(intent, now)
        case _:
            assert_never(observation)
