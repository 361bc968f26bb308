"""What may become of a process, and when one that ended by itself is started again. Pure.

starting ──▶ ready ──▶ stopping ──▶ (gone)
    │          │
    │          └─ ended ─▶ restarting ─▶ starting …      or, when nobody wants it again, failed
    └─ ended while it was first started ─▶ (gone): whoever asked for it is told why
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from corral.contract.codec import Message
from corral.contract.messages.replicas import ReplicaState


class Happened(StrEnum):
    ANSWERED = "answered"  # ready to serve
    NEVER_RAN = "never run"  # its first start failed
    ENDED = "ended"  # by itself, or could not be started again
    GIVEN_UP = "given up"  # ended, and not to be started again
    AGAIN = "again"  # the wait before a restart is over
    STOP = "stop"  # somebody wants it gone
    STOPPED = "stopped"


_TABLE: dict[ReplicaState, dict[Happened, ReplicaState | None]] = {
    ReplicaState.STARTING: {
        Happened.ANSWERED: ReplicaState.READY,
        Happened.NEVER_RAN: None,
        Happened.ENDED: ReplicaState.RESTARTING,
        Happened.GIVEN_UP: ReplicaState.FAILED,
        Happened.STOP: ReplicaState.STOPPING,
    },
    ReplicaState.READY: {
        Happened.ENDED: ReplicaState.RESTARTING,
        Happened.GIVEN_UP: ReplicaState.FAILED,
        Happened.STOP: ReplicaState.STOPPING,
    },
    ReplicaState.RESTARTING: {
        Happened.AGAIN: ReplicaState.STARTING,
        Happened.STOP: ReplicaState.STOPPING,
    },
    ReplicaState.STOPPING: {Happened.STOPPED: None},
    ReplicaState.FAILED: {Happened.STOP: ReplicaState.STOPPING},
}


def after(state: ReplicaState, happened: Happened) -> ReplicaState | None:
    """The next state; None when the process is dropped from the table. An impossible step is a mistake of ours."""
    try:
        return _TABLE[state][happened]
    except KeyError:
        raise ValueError(f"a process that is {state} cannot have {happened}") from None


class RestartPolicy(Message, frozen=True):
    """Whether and how soon a process that ended by itself comes back. Kept with the process, so that a worker which
    adopts it knows. The waits double; one that ran for `calm_s` starts counting anew."""

    first_s: float = 1.0
    cap_s: float = 60.0
    calm_s: float = 300.0
    most: int = -1  # restarts in a row; -1: as often as it takes


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
