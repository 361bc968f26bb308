"""Alive, silent, or we cannot tell: pure. Silence is not death, and our own outage is not theirs.

Staleness counts only time in which this controller could receive and record heartbeats. So a full grace period follows
its own start and each outage of bus or database.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from corral.contract.messages.nodes import NodeId, NodeStatus
from corral.controller.registry.transitions import NodeEvent


@dataclass(frozen=True)
class Pulse:
    """What the monitor knows of one node. Ages are spans on the database's clock; negative where that was set back."""

    node: NodeId
    status: NodeStatus
    status_age_s: float
    heartbeat_age_s: float | None  # None: never heard
    left: bool = False


@dataclass(frozen=True)
class Guard:
    """Automation takes no more than `share_percent` of the fleet offline within one window; fewer than `floor` silent
    nodes are no mass outage, however small the fleet."""

    share_percent: int = 40
    floor: int = 3


@dataclass(frozen=True)
class Verdict:
    events: tuple[tuple[NodeId, NodeEvent], ...]
    held: int  # how many silent nodes the guard left alone
    is_mass_outage: bool = False


def classify(
    pulses: Sequence[Pulse], *, observed_s: float, stale_after_s: float, guard: Guard, outage_ago_s: float | None = None
) -> Verdict:
    """`observed_s`: for how long this controller has been able to receive and record without a gap. `outage_ago_s`:
    time since the last verdict that was a mass outage; None: there was none."""
    back = tuple((p.node, NodeEvent.CAME_BACK) for p in pulses if _is_back(p, stale_after_s))
    if observed_s < stale_after_s:
        return Verdict(back, 0)
    silent = [p.node for p in pulses if _is_silent(p, stale_after_s)]
    is_mass_outage = _is_mass_outage(pulses, len(silent), stale_after_s, guard)
    # Nodes return from an outage one by one. When enough are back the rest is no mass outage any more, but it was cut
    # off by the same cause: it gets as much time as any node to be heard again.
    is_recovering = outage_ago_s is not None and outage_ago_s < stale_after_s
    held = is_mass_outage or is_recovering
    event = NodeEvent.SILENT_BUT_HELD if held else NodeEvent.WENT_SILENT
    return Verdict((*back, *((node, event) for node in silent)), len(silent) if held else 0, is_mass_outage)


def is_still_true(pulse: Pulse, event: NodeEvent, *, observed_s: float, stale_after_s: float) -> bool:
    """Asked again of one node at the moment of writing: between a verdict and its execution anything may have happened,
    to the node or to us."""
    if event is NodeEvent.CAME_BACK:
        return _is_back(pulse, stale_after_s)
    return observed_s >= stale_after_s and _is_silent(pulse, stale_after_s)


# Of the limit; with defaults that is three heartbeats missed. A larger share would miss nodes of one outage whose last
# heartbeats lie further apart, such as those with a longer interval.
_LATE = 0.5
_PRESENT = (NodeStatus.HEALTHY, NodeStatus.UNHEALTHY, NodeStatus.DRAINING)


def _is_mass_outage(pulses: Sequence[Pulse], silent: int, window_s: float, guard: Guard) -> bool:
    """Heartbeats are not in step, so a cut network shows up node by node. Nodes that fell in this window therefore
    count, and so do those that are late enough to be next: a rolling outage must not slip through one by one."""
    just_fallen = sum(1 for p in pulses if p.status is NodeStatus.OFFLINE and not p.left and p.status_age_s < window_s)
    fleet = just_fallen + sum(1 for p in pulses if p.status in _PRESENT)
    gone = just_fallen + sum(1 for p in pulses if _is_silent(p, window_s * _LATE))
    return silent > 0 and gone >= guard.floor and gone * 100 > guard.share_percent * fleet


def _is_back(pulse: Pulse, stale_after_s: float) -> bool:
    if pulse.status not in (NodeStatus.OFFLINE, NodeStatus.UNHEALTHY) or pulse.left or pulse.heartbeat_age_s is None:
        return False
    # The heartbeat must be younger than the verdict it overturns; one passed tomorrow, before the clock was set back,
    # cannot be compared with anything.
    is_younger = pulse.heartbeat_age_s < pulse.status_age_s or pulse.status_age_s < -stale_after_s
    return is_younger and abs(pulse.heartbeat_age_s) < stale_after_s


def _is_silent(pulse: Pulse, stale_after_s: float) -> bool:
    """Also true for a last heartbeat in the future: a live node has sent another one since the clock was set back."""
    if pulse.status not in _PRESENT:
        return False
    return pulse.heartbeat_age_s is None or abs(pulse.heartbeat_age_s) >= stale_after_s
