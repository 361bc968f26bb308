"""What is to be believed of a process on a LocalAI worker, from what its worker lists and what it answers itself. Pure.

Its worker's list has the last word on whether it is there: a process that is not on it is gone, however lately it
answered; one that is on it may be busy for as long as it likes. Only one that cannot be reached from here, look after
look, is of no use though it lives.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from corral.contract.messages.models import RunningModel
from corral.contract.messages.replicas import ReplicaState
from corral.controller.localai.processes import port_of
from corral.inference.backend_process import ProcessHealth

MISSES = 3


class Process(Protocol):
    """What of it counts here."""

    @property
    def model(self) -> str: ...
    @property
    def replica(self) -> int: ...
    @property
    def address(self) -> str: ...
    @property
    def state(self) -> str: ...


@dataclass(frozen=True)
class ProcessStays:
    misses: int = 0


@dataclass(frozen=True)
class ProcessGone:
    why: str


@dataclass(frozen=True)
class ProcessUseless:
    """It lives, and is not to be asked: it has to be replaced."""

    why: str


Judgement = ProcessStays | ProcessGone | ProcessUseless


def classify_process(
    process: Process,
    running: Mapping[tuple[str, int], RunningModel] | None,
    pulse: ProcessHealth,
    misses: int,
    *,
    is_another: bool = False,
) -> Judgement:
    """`running` None: its worker does not say what runs. `misses`: looks in a row at which it could not be reached.
    `is_another`: it says itself that it holds another model."""
    unreachable = pulse is ProcessHealth.UNREACHABLE
    if running is not None:
        found = running.get((process.model, process.replica))
        if found is None:
            return ProcessGone("its worker does not list it any more")
        if found.address and port_of(found.address) != port_of(process.address):
            return ProcessGone("another process has taken its place")
    if is_another:
        return ProcessUseless("it holds another model than it was told to load")
    if not unreachable:
        return ProcessStays()
    if misses + 1 < MISSES:
        return ProcessStays(misses + 1)
    if running is None:
        return ProcessGone(f"nobody answers at {process.address}")
    return ProcessUseless(f"its worker says that it runs, and it cannot be reached at {process.address}")


def is_watched(process: Process) -> bool:
    """One that has failed, or is being stopped and therefore on nobody's list, is for the order to stop to settle."""
    return process.state == ReplicaState.READY
