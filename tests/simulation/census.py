"""What one run of the simulation went through, in numbers for a report (`scripts/simulate`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


def kind_of(method: Callable[..., Any]) -> str:
    """What a method of the simulation does, as a report names it: `_bus_falls_silent` is "bus falls silent"."""
    name = getattr(getattr(method, "func", method), "__name__", "")
    return str(name).strip("_").replace("_", " ")


@dataclass
class Census:
    faults: Counter[str] = field(default_factory=Counter)  # by kind
    requests: Counter[str] = field(default_factory=Counter)  # of people and clients, by kind
    commits: int = 0
    checked_states: int = 0  # commits after which the invariants were evaluated
    node_s: float = 0.0  # simulated seconds of running workers
    simulated_s: float = 0.0
    _running_since: dict[str, float] = field(default_factory=dict)

    def node_started(self, name: str, now_s: float) -> None:
        self._running_since.setdefault(name, now_s)

    def node_stopped(self, name: str, now_s: float) -> None:
        self.node_s += now_s - self._running_since.pop(name, now_s)

    def as_json(self) -> dict[str, Any]:
        return {
            "faults": dict(sorted(self.faults.items())),
            "requests": dict(sorted(self.requests.items())),
            "commits": self.commits,
            "checked_states": self.checked_states,
            "node_s": round(self.node_s, 1),
            "simulated_s": round(self.simulated_s, 1),
        }
