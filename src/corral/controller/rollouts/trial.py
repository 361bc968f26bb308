"""The trial of a new revision of a model: its share of the requests, and one step of its rollout. Pure.

The rules are those of any rollout (`plan.py`), with one class. Its canary is the first replica of the new revision; a
soak has three parts of equal length, in which the revision gets 5 %, 25 % and all of the requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from msgspec.structs import replace

from corral.controller.rollouts.comparison import Judgement
from corral.controller.rollouts.plan import MAX_SWITCH_FAILURES, NodeState, RolloutNode, plan_rollout, soak_words
from corral.store.records import ModelTrial, Rollout, RolloutClass, RolloutPhase

SHARES = (5, 25, 100)  # percent
_HERE = ("healthy", "unhealthy")


@dataclass(frozen=True)
class TrialReplica:
    """A replica of the new revision that is not leaving."""

    node_id: str
    node_name: str
    status: str  # of its node
    state: NodeState  # switched: it has been ready
    ready: bool = False
    process_id: str = ""
    restarts: int = 0


def class_name(trial: ModelTrial) -> str:
    return f"revision {trial.revision[:8]}"


def state_of_trial(rollout: Rollout) -> RolloutClass:
    return rollout.classes[0] if rollout.classes else RolloutClass("")


def share_of(rollout: Rollout) -> int:
    """The percentage of the requests that the new revision gets."""
    if rollout.trial is None or rollout.is_over:
        return 0
    if rollout.trial.in_place:
        return 100
    state, settings = state_of_trial(rollout), rollout.settings
    if not state.soaking:
        return 0
    done = state.soaked_s / settings.soak_s if settings.soak_s else state.new_requests / settings.soak_requests
    return SHARES[min(int(done * len(SHARES)), len(SHARES) - 1)]


def replicas_for(share: int, old_replicas: int) -> int:
    """How many replicas the new revision needs for its share of what the old ones serve."""
    return max(1, -(-share * old_replicas // 100))


def plan_trial(rollout: Rollout, replicas: Sequence[TrialReplica], judgement: Judgement, now: datetime) -> Rollout:
    """One step. A trial that is over does not change."""
    trial = rollout.trial
    if trial is None or rollout.is_over:
        return rollout
    name = class_name(trial)
    nodes = _nodes(replicas, name, state_of_trial(rollout))
    if trial.failures >= MAX_SWITCH_FAILURES:
        nodes.append(_failed(trial, name))
    judgements = {node.id: judgement for node in nodes}
    after = plan_rollout(rollout, nodes, judgements, now, max_parallel="100%").rollout
    if after.phase is not RolloutPhase.REVERTED and state_of_trial(after).passed:
        # Replicas that still start are the model's from now on, like any other's.
        after = replace(after, phase=RolloutPhase.DONE, ended_at=now)
    return after


def is_worth_storing(before: Rollout, after: Rollout, tick: timedelta) -> bool:
    """Whether more has changed than the time since the last step, while that is shorter than `tick`."""
    if before.ticked_at is None or after.ticked_at is None or abs(after.ticked_at - before.ticked_at) >= tick:
        return after != before
    return _timeless(before) != _timeless(after)


def trial_words(rollout: Rollout) -> str:
    """How far it is, in one sentence."""
    trial, state = rollout.trial, state_of_trial(rollout)
    if trial is None:
        return ""
    if state.soaking:
        share = "all requests" if share_of(rollout) == 100 else f"{share_of(rollout)} % of the requests"
        return f"{soak_words(rollout, state)}; it gets {share}"
    if trial.waiting:
        return f"waits for a node: {trial.waiting}"
    last = next(reversed(trial.failed_on.values()), "")
    failed = f"; its first start failed: {last}" if last else ""
    if trial.in_place and not state.canary:
        return f"waits until a replica of the new revision is ready{failed}"
    return f"a replica of the new revision starts{f' on {state.canary_name}' if state.canary else ''}{failed}"


def _nodes(replicas: Sequence[TrialReplica], name: str, state: RolloutClass) -> list[RolloutNode]:
    """The nodes of its replicas. All of them serve the same share, so all count as the canary's."""
    processes = tuple(sorted(each.process_id for each in replicas if each.process_id))
    restarts = sum(each.restarts for each in replicas)
    steady = any(each.ready and each.status == "healthy" for each in replicas)
    best: dict[str, TrialReplica] = {}
    for each in replicas:
        known = best.get(each.node_id)
        if known is None or (each.state is NodeState.SWITCHED, each.ready) > (
            known.state is NodeState.SWITCHED,
            known.ready,
        ):
            best[each.node_id] = each
    nodes = [
        RolloutNode(
            each.node_id,
            each.node_name,
            name,
            each.state,
            serves=False,  # it is not worth waiting for before it has begun
            present=each.status in _HERE,
            steady=steady,
            processes=processes,
            restarts=restarts,
        )
        for each in best.values()
    ]
    if state.soaking and state.canary not in best:
        nodes.append(
            RolloutNode(state.canary, state.canary_name, name, NodeState.FETCHING, serves=False, present=False)
        )
    # Without any node there would be nothing to wait for.
    return nodes or [RolloutNode("", "", name, NodeState.FETCHING, serves=False)]


def _failed(trial: ModelTrial, name: str) -> RolloutNode:
    reason = next(reversed(trial.failed_on.values()), "")
    return RolloutNode(
        "failed",
        trial.failed_node or "the fleet",
        name,
        NodeState.FETCHING,
        serves=False,
        switch_failures=trial.failures,
        reason=reason,
    )


def _timeless(rollout: Rollout) -> Rollout:
    return replace(
        rollout, ticked_at=None, classes=tuple(replace(each, soaked_s=0.0, unsteady_s=0.0) for each in rollout.classes)
    )
