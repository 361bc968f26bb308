"""Reads what the builds of a rollout served, from receipts. A receipt names the process and the build that answered, so
nothing is counted while requests are served: only a soak reads receipts, every few seconds, and a limited number."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta

from corral.controller.rollouts.comparison import Judgement, Sample, compare_builds
from corral.controller.rollouts.options import MAX_SAMPLES
from corral.store.engine.transactions import Transaction
from corral.store.records import Rollout, RolloutClass
from corral.store.tables import receipts
from corral.store.tables.receipts import ServedRequest

# Requests of the old build count from so long before the rollout: a class of one node has no other old ones. It is also
# the room for a clock that was set back.
LOOK_BACK = timedelta(hours=1)
MIN_WINDOW_S = 10.0
_WINDOWS_OF_A_SOAK = 30

Judgements = Mapping[tuple[str, str], Judgement]  # by operation and canary


async def read_judgements(tx: Transaction, rollouts: Iterable[Rollout]) -> Judgements:
    """Of the classes that soak."""
    return {
        (rollout.operation_id, each.canary): await _compare_class(tx, rollout, each)
        for rollout in rollouts
        for each in rollout.classes
        if each.soaking
    }


async def _compare_class(tx: Transaction, rollout: Rollout, state: RolloutClass) -> Judgement:
    since = rollout.started_at - LOOK_BACK
    window_s = max(MIN_WINDOW_S, rollout.settings.soak_s / _WINDOWS_OF_A_SOAK)
    new = await receipts.list_served_by_processes(tx, state.processes, since=since, limit=MAX_SAMPLES)
    if (trial := rollout.trial) is not None:
        former = await receipts.list_served_by_revision(
            tx, rollout.subject, trial.old_revision, since=since, limit=MAX_SAMPLES
        )
        alike = _of_its_class(rollout, state.canary, former)
        return compare_builds(samples_of(new), samples_of(alike), rollout.settings, window_s=window_s)
    own = {node_id: before for node_id, before in rollout.nodes.items() if before.hardware == state.name}
    digests = sorted({before.digest for before in own.values() if before.digest})
    old = await receipts.list_served_by_builds(tx, digests, since=since, limit=MAX_SAMPLES)
    samples = samples_of(new), samples_of(each for each in old if each.node_id in own)
    return compare_builds(*samples, rollout.settings, window_s=window_s)


def _of_its_class(rollout: Rollout, canary: str, served: Sequence[ServedRequest]) -> Sequence[ServedRequest]:
    """The requests of nodes of the canary's hardware class; all, if no such node served any."""
    known = rollout.nodes.get(canary)
    own = {node_id for node_id, each in rollout.nodes.items() if known is not None and each.hardware == known.hardware}
    return [each for each in served if each.node_id in own] or served


def samples_of(served: Iterable[ServedRequest]) -> list[Sample]:
    """Without requests that their client made wrongly or gave up: they say nothing about a build."""
    return [_sample(each) for each in served if not (400 <= each.status < 500 or each.ending == "client_left")]


def _sample(served: ServedRequest) -> Sample:
    waited_us = served.queue_us + served.load_us
    first_us = max(0, served.first_byte_us - waited_us) if served.first_byte_us else 0
    return Sample(
        at=served.at.timestamp(),
        model=served.served_by or served.model,
        streamed=served.streamed,
        failed=served.status >= 500 or served.ending == "upstream_broke",
        first_s=first_us / 1e6,
        total_s=max(0, served.total_us - waited_us) / 1e6,
        tokens=served.completion_tokens,
    )
