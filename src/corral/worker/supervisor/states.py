"""The states of a process, and when a process that ended by itself is restarted. Pure.

starting ──▶ ready ──▶ stopping ──▶ (gone)
    │          │
    │          └─ ended ─▶ restarting ─▶ starting …      or, after too many restarts, failed
    └─ ended while it was first started ─▶ (gone): the order gets the error
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from corral.contract.codec import Message
from corral.contract.messages.replicas import ReplicaState


class ProcessEvent(StrEnum):
    ANSWERED = "answered"  # ready to serve
    NEVER_RAN = "never run"  # its first start failed
    ENDED = "ended"  # by itself, or could not be started again
    GIVEN_UP = "given up"  # ended, and not to be started again
    AGAIN = "again"  # the wait before a restart is over
    STOP = "stop"  # it is to be stopped
    STOPPED = "stopped"


_TABLE: dict[ReplicaState, dict[ProcessEvent, ReplicaState | None]] = {
    ReplicaState.STARTING: {
        ProcessEvent.ANSWERED: ReplicaState.READY,
        ProcessEvent.NEVER_RAN: None,
        ProcessEvent.ENDED: ReplicaState.RESTARTING,
        ProcessEvent.GIVEN_UP: ReplicaState.FAILED,
        ProcessEvent.STOP: ReplicaState.STOPPING,
    },
    ReplicaState.READY: {
        ProcessEvent.ENDED: ReplicaState.RESTARTING,
        ProcessEvent.GIVEN_UP: ReplicaState.FAILED,
        ProcessEvent.STOP: ReplicaState.STOPPING,
    },
    ReplicaState.RESTARTING: {
        ProcessEvent.AGAIN: ReplicaState.STARTING,
        ProcessEvent.STOP: ReplicaState.STOPPING,
    },
    ReplicaState.STOPPING: {ProcessEvent.STOPPED: None},
    ReplicaState.FAILED: {ProcessEvent.STOP: ReplicaState.STOPPING},
}


def after(state: ReplicaState, happened: ProcessEvent) -> ReplicaState | None:
    """The next state; None when the process leaves the table. Raises ValueError for an event that cannot happen."""
    try:
        return _TABLE[state][happened]
    except KeyError:
        raise ValueError(f"a process that is {state} cannot have {happened}") from None


class RestartPolicy(Message, frozen=True):
    """Whether and how soon a process that ended by itself is restarted. Stored with the process, for a worker that
    adopts it. The delays double; a process that ran for `calm_s` starts with the first delay again."""

    first_s: float = 1.0
    cap_s: float = 60.0
    calm_s: float = 300.0
    most: int = -1  # restarts in a row; -1: no limit


NEVER = RestartPolicy(most=0)


@dataclass(frozen=True)
class RestartIn:
    seconds: float
    failures: int  # in a row, this one included


@dataclass(frozen=True)
class GiveUp:
    failures: int


def decide_restart(policy: RestartPolicy, *, failures: int, ran_s: float) -> RestartIn | GiveUp:
    """`failures` before this one; `ran_s` is how long it had been ready, 0 when it never was."""
    failures = 1 if ran_s >= policy.calm_s else failures + 1
    if 0 <= policy.most < failures:
        return GiveUp(failures)
    return RestartIn(min(policy.cap_s, policy.first_s * 2.0 ** min(failures - 1, 64)), failures)
