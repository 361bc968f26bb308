"""Plans one step of a rollout: which nodes may switch now, which soaks have passed, and whether to revert. Pure.

It does not matter what is switched: nodes have a class and a state, classes a canary, and the caller says what
"switched" means. All that lasts is in the `Rollout`, so another controller continues with the same decision. A soak
counts the time between two steps, at most `MAX_TICK`: neither a stepped clock nor a time without a controller counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum

from msgspec.structs import replace

from corral.controller.rollouts.comparison import MAX_WINDOWS, Judgement
from corral.controller.rollouts.options import allowed_at_once, describe_soak
from corral.kit.durations import format_duration
from corral.store.records import Rollout, RolloutClass, RolloutPhase, RolloutWindow

MAX_TICK = timedelta(seconds=10)
MAX_SWITCH_FAILURES = 2  # of one node: the second one reverts what has switched
MAX_LOST_CANARIES = 2
MAX_DEATHS = 2  # of a canary's processes, before the end of its soak


class NodeState(StrEnum):
    FETCHING = "fetching"  # it has not got the new build yet
    READY = "ready"  # only the switch is left
    SWITCHING = "switching"
    SWITCHED = "switched"


@dataclass(frozen=True)
class RolloutNode:
    id: str
    name: str
    hardware: str
    state: NodeState
    serves: bool = True  # it has processes that would show what the new build does
    present: bool = True  # it can serve and take orders; False: offline, draining
    steady: bool = True  # False for a short time while it is not known whether it is there: the soak waits
    unsteady: str = ""  # why it is not steady
    switch_failures: int = 0
    fatal: bool = False  # a failed switch that a retry does not cure
    reason: str = ""  # of the failed switch
    processes: tuple[str, ...] = ()  # of the new build
    restarts: int = 0  # of these


@dataclass(frozen=True)
class Held:
    reason: str
    stopped: bool = False  # nothing happens before somebody acts or another node succeeds


@dataclass(frozen=True)
class RolloutStep:
    rollout: Rollout
    held: Mapping[str, Held] = field(default_factory=dict)  # by id, of nodes that are ready
    soaking: Mapping[str, Held] = field(default_factory=dict)  # by id, of canaries: how far their soak is

    @property
    def reverts(self) -> bool:
        return self.rollout.phase is RolloutPhase.REVERTED


def plan_rollout(
    rollout: Rollout,
    nodes: Sequence[RolloutNode],
    judgements: Mapping[str, Judgement],
    now: datetime,
    *,
    max_parallel: str,
) -> RolloutStep:
    """`judgements`: by canary, of soaks. A rollout that is over does not change."""
    if rollout.is_over:
        return RolloutStep(rollout)
    members: dict[str, list[RolloutNode]] = {}
    for node in sorted(nodes, key=lambda node: (node.name, node.id)):
        members.setdefault(node.hardware, []).append(node)
    elapsed = now - rollout.ticked_at if rollout.ticked_at is not None else timedelta()
    tick_s = min(max(elapsed, timedelta()), MAX_TICK).total_seconds()
    before = {each.name: each for each in rollout.classes}
    classes = [
        _advance(rollout, before.get(name, RolloutClass(name)), own, judgements, now, tick_s)
        for name, own in sorted(members.items())
    ]
    verdicts = [_verdict_of_class(rollout, each, judgements.get(each.canary, Judgement())) for each in classes]
    verdict = next(filter(None, (_verdict(rollout, nodes), *verdicts)), "")
    phase = RolloutPhase.REVERTED if verdict else _phase(classes, members)
    over = verdict or phase is RolloutPhase.DONE
    rollout = replace(
        rollout,
        classes=tuple(classes),
        phase=phase,
        verdict=verdict,
        ticked_at=now if any(each.soaking for each in classes) else rollout.ticked_at,
        ended_at=now if over else None,
    )
    if verdict:
        reason = f"the rollout is reverted: {verdict}"
        held = {node.id: Held(reason, stopped=True) for node in nodes if _is_ready(node)}
        return RolloutStep(rollout, held, _soaking(rollout, classes))
    return RolloutStep(rollout, _held(rollout, members, max_parallel), _soaking(rollout, classes))


def _advance(
    rollout: Rollout,
    state: RolloutClass,
    own: Sequence[RolloutNode],
    judgements: Mapping[str, Judgement],
    now: datetime,
    tick_s: float,
) -> RolloutClass:
    if state.passed:
        return state
    state = _with_canary(state, own)
    canary = next((node for node in own if node.id == state.canary), None)
    if canary is None or canary.state is not NodeState.SWITCHED:
        return state
    if rollout.promoted_by:
        return replace(state, soaking=False, waiting="", passed=f"promoted by {rollout.promoted_by}")
    if not rollout.settings.has_soak:
        return replace(state, passed="the canary switched")
    return _soak(rollout, state, canary, judgements.get(canary.id, Judgement()), now, tick_s)


def _with_canary(state: RolloutClass, own: Sequence[RolloutNode]) -> RolloutClass:
    """The class with its canary, or with another one where that has left."""
    canary = next((node for node in own if node.id == state.canary), None)
    if canary is not None and (canary.present or canary.state is NodeState.SWITCHING):
        return state
    others = [node for node in own if node.id != state.canary]
    choice = _choose(others)
    if choice is None:
        if canary is None:
            return RolloutClass(state.name, lost=state.lost)
        return replace(state, waiting=f"{canary.name} is away, and the class has no other node")
    # One that was drained while its order was on the way has the build too.
    has_build = state.soaking or (canary is not None and canary.state is NodeState.SWITCHED)
    lost = (*state.lost, state.canary) if has_build else state.lost
    return RolloutClass(state.name, canary=choice.id, canary_name=choice.name, lost=lost)


def _choose(nodes: Sequence[RolloutNode]) -> RolloutNode | None:
    """A node that has begun goes first, then one that serves requests; a node that fetches is worth waiting for if it
    serves and no other does."""
    here = [node for node in nodes if node.present]
    for state in (NodeState.SWITCHED, NodeState.SWITCHING):
        if begun := [node for node in here if node.state is state]:
            return begun[0]
    ready = [node for node in here if node.state is NodeState.READY]
    serving = [node for node in ready if node.serves]
    if serving or any(node.serves and node.state is NodeState.FETCHING and not node.reason for node in here):
        return serving[0] if serving else None
    return ready[0] if ready else None


def _soak(
    rollout: Rollout,
    state: RolloutClass,
    canary: RolloutNode,
    found: Judgement,
    now: datetime,
    tick_s: float,
) -> RolloutClass:
    settings = rollout.settings
    counts = state.soaking and canary.present and canary.steady and not rollout.paused_by
    first = canary.restarts if state.restarts is None else min(state.restarts, canary.restarts)
    state = replace(
        state,
        soaking=True,
        since=state.since or now,
        unsteady_s=0.0 if canary.steady else state.unsteady_s + tick_s,
        soaked_s=state.soaked_s + (tick_s if counts else 0.0),
        processes=canary.processes or state.processes,
        restarts=first if canary.processes or state.restarts is not None else None,
        deaths=max(state.deaths, canary.restarts - first),
        waiting=_soak_waits(rollout, canary),
        new_requests=found.new_requests,
        old_requests=found.old_requests,
        figures=found.figures,
        new_windows=_later_windows(state.new_windows, found.new_windows),
        old_windows=_later_windows(state.old_windows, found.old_windows),
    )
    over = state.soaked_s >= settings.soak_s if settings.soak_s else found.new_requests >= settings.soak_requests
    what = rollout.what
    if not over or state.waiting or state.deaths:
        return state
    if found.figures:
        return replace(state, soaking=False, passed=f"no figure was worse in {found.new_requests} requests")
    if settings.soak_requests:
        return replace(state, waiting=f"the old {what} served too few requests to compare with: promote, or wait")
    few = f"too few requests to judge: {found.new_requests} by the new {what}, {found.old_requests} by the old one"
    kept = "it stayed healthy" if rollout.is_of_corral else "its processes kept running"
    return replace(state, soaking=False, passed=f"{few}, {settings.min_requests} needed; {kept}")


def _later_windows(before: tuple[RolloutWindow, ...], now: tuple[RolloutWindow, ...]) -> tuple[RolloutWindow, ...]:
    """The curve so far, continued: the figures come from the last requests only, and the first of their windows may
    lack some."""
    known = {window.at: window for window in before}
    for window in now:
        if window.requests >= known.get(window.at, window).requests:
            known[window.at] = window
    return tuple(known[at] for at in sorted(known)[-MAX_WINDOWS:])


def _soak_waits(rollout: Rollout, canary: RolloutNode) -> str:
    if rollout.paused_by:
        return f"paused by {rollout.paused_by}"
    if not canary.present:
        return f"{canary.name} is away"
    return "" if canary.steady else canary.unsteady or f"{canary.name} does not answer at the moment"


def _verdict(rollout: Rollout, nodes: Sequence[RolloutNode]) -> str:
    if rollout.aborted_by:
        return f"aborted by {rollout.aborted_by}"
    begun = rollout.settings.has_soak or any(node.state is NodeState.SWITCHED for node in nodes)
    for node in nodes:
        failed = node.switch_failures >= MAX_SWITCH_FAILURES or (node.fatal and node.switch_failures)
        if begun and failed and node.state is not NodeState.SWITCHED:
            times = "once, and a retry cannot help" if node.fatal else f"{node.switch_failures} times"
            did = "switch" if rollout.trial is None else "start it"
            return f"{node.name} failed to {did} {times}: {node.reason or 'no reason was reported'}"
    return ""


def _verdict_of_class(rollout: Rollout, state: RolloutClass, found: Judgement) -> str:
    if state.passed:
        return ""
    if len(state.lost) >= MAX_LOST_CANARIES:
        return f"{len(state.lost)} canaries of {state.name} left during their soak"
    if not state.soaking:
        return ""
    if found.fault:
        return found.fault
    if found.verdict:
        return f"{found.verdict}, on {state.canary_name}"
    over = 0 < rollout.settings.soak_s <= state.soaked_s
    if state.deaths >= MAX_DEATHS or (state.deaths and over):
        times = "once" if state.deaths == 1 else f"{state.deaths} times"
        whose = "the worker" if rollout.is_of_corral else "a process"
        return f"{whose} of the new {rollout.what} ended by itself {times} on {state.canary_name}"
    return ""


def _phase(classes: Sequence[RolloutClass], members: Mapping[str, Sequence[RolloutNode]]) -> RolloutPhase:
    if any(each.soaking for each in classes):
        return RolloutPhase.SOAK
    everybody = [node for own in members.values() for node in own]
    open_classes = [each for each in classes if not each.passed]
    if not open_classes and all(node.state is NodeState.SWITCHED for node in everybody):
        return RolloutPhase.DONE
    if any(each.canary for each in open_classes):
        return RolloutPhase.CANARY
    # A class without a node that is there does not keep the others from being finished.
    if any(node.present for each in open_classes for node in members[each.name]):
        return RolloutPhase.FETCHING
    return RolloutPhase.WAVES


def _held(rollout: Rollout, members: Mapping[str, Sequence[RolloutNode]], max_parallel: str) -> dict[str, Held]:
    everybody = [node for own in members.values() for node in own]
    broken = next((node for node in everybody if _has_failed(node)), None)
    busy = sum(node.state is NodeState.SWITCHING for node in everybody)
    limit = allowed_at_once(max_parallel, len(everybody))
    held: dict[str, Held] = {}
    for state in rollout.classes:
        for node in members[state.name]:
            if not _is_ready(node):
                continue
            if rollout.paused_by:
                held[node.id] = Held(f"the rollout was paused by {rollout.paused_by}", stopped=True)
            elif broken is not None and node is not broken:
                why = broken.reason or "it is being retried"
                held[node.id] = Held(f"stopped: {broken.name} failed to switch: {why}", stopped=True)
            elif not state.passed and node.id != state.canary:
                held[node.id] = Held(_before_its_class(state))
            elif busy >= limit:
                held[node.id] = Held(f"waits for its turn: {max_parallel} of the nodes at once")
            else:
                busy += 1
    return held


def _before_its_class(state: RolloutClass) -> str:
    if state.soaking:
        return f"waits for the soak on {state.canary_name} ({state.name})"
    return f"waits for the first node with {state.name} to switch"


def _soaking(rollout: Rollout, classes: Sequence[RolloutClass]) -> dict[str, Held]:
    return {
        each.canary: Held(soak_words(rollout, each), stopped=bool(each.waiting)) for each in classes if each.soaking
    }


def soak_words(rollout: Rollout, state: RolloutClass) -> str:
    """`soaks: 1m20s of 5m, 34 requests`."""
    settings = rollout.settings
    time = f"{format_duration(round(state.soaked_s))} of {describe_soak(settings)}, " if settings.soak_s else ""
    needed = f" of {settings.soak_requests}" if settings.soak_requests else ""
    words = f"soaks: {time}{state.new_requests}{needed} requests"
    return f"{words}; {state.waiting}" if state.waiting else words


def _has_failed(node: RolloutNode) -> bool:
    return node.switch_failures > 0 and node.state is not NodeState.SWITCHED


def _is_ready(node: RolloutNode) -> bool:
    return node.state is NodeState.READY
