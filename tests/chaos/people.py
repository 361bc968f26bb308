"""People of a chaos run: they install, upgrade, roll back and delete a backend, edit models, drain nodes, make keys.

Everything that a controller accepted is remembered; nothing of it may be forgotten.
"""

from __future__ import annotations

import threading
from collections import Counter
from random import Random
from typing import Any

from tests.chaos.fleet import EXTRA, ChaosFleet
from tests.support.fleet import Answer

EDITED = "mock-spread"


class People:
    def __init__(self, fleet: ChaosFleet, chance: Random, *, every_s: float) -> None:
        self._fleet = fleet
        self._chance = chance
        self._every_s = every_s
        self._build = 1
        self._edits = 0
        self.accepted: list[str] = []  # operations
        self.counts: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()

    def run(self, over: threading.Event) -> None:
        actions = (
            (self._install, 5),
            (self._upgrade, 4),
            (self._roll_back, 2),
            (self._delete, 3),
            (self._edit, 3),
            (self._drain, 2),
            (self._cancel, 1),
            (self._make_key, 1),
        )
        while not over.wait(self._chance.expovariate(1 / self._every_s)):
            action = self._chance.choices([each for each, _ in actions], [weight for _, weight in actions])[0]
            name = action.__name__.strip("_").replace("_", " ")
            try:
                answer = action()
            except (OSError, AssertionError) as error:
                self.refused[f"{name}: {type(error).__name__}"] += 1
                continue
            if answer.status < 300:
                self.counts[name] += 1
            else:
                self.refused[f"{name}: {answer.status}"] += 1

    def undo(self) -> None:
        """Drained nodes return, whatever the last thing was that somebody did."""
        for name, node in self._fleet.nodes().items():
            if node["status"] == "draining":
                self._fleet.api("POST", f"/api/nodes/{name}/resume")

    def _scope(self) -> str:
        return f"?node={self._node()}" if self._chance.random() < 0.4 else ""

    def _node(self) -> str:
        return self._chance.choice(sorted(self._fleet.machines))

    def _install(self) -> Answer:
        return self._operation(f"/api/backends/install/{EXTRA}{self._scope()}")

    def _upgrade(self) -> Answer:
        if self._chance.random() < 0.5:
            self._build += 1
            self._fleet.publish(self._build)
        return self._operation(f"/api/backends/upgrade/{EXTRA}{self._scope()}")

    def _roll_back(self) -> Answer:
        return self._operation(f"/api/backends/rollback/{EXTRA}{self._scope()}")

    def _delete(self) -> Answer:
        return self._operation(f"/api/backends/delete/{EXTRA}{self._scope()}")

    def _edit(self) -> Answer:
        self._edits += 1
        return self._fleet.api("PATCH", f"/api/models/{EDITED}", {"changes": {"context_size": 2048 + self._edits}})

    def _drain(self) -> Answer:
        nodes = self._fleet.nodes()
        drained = [name for name, node in nodes.items() if node["status"] == "draining"]
        if drained:
            return self._fleet.api("POST", f"/api/nodes/{drained[0]}/resume")
        return self._fleet.api("POST", f"/api/nodes/{self._node()}/drain")

    def _cancel(self) -> Answer:
        listed = self._fleet.api("GET", "/api/operations")
        if listed.status != 200 or not (rows := _operations(listed)):
            return listed
        return self._fleet.api("POST", f"/api/operations/{self._chance.choice(rows)}/cancel")

    def _make_key(self) -> Answer:
        made = self._fleet.api("POST", "/api/keys", {"name": f"k{self._chance.randrange(10**9)}", "role": "inference"})
        if made.status != 201:
            return made
        return self._fleet.api("DELETE", f"/api/keys/{made.json()['key']['id']}")

    def _operation(self, path: str) -> Answer:
        answer = self._fleet.api("POST", path, {})
        if answer.status < 300:
            told: dict[str, Any] = answer.json()
            id = told.get("jobID")
            if id:
                self.accepted.append(str(id))
        return answer


def _operations(answer: Answer) -> list[str]:
    told = answer.json()
    rows = told.get("operations", []) if isinstance(told, dict) else told
    return sorted(str(row.get("jobID") or row.get("job_id") or row.get("id")) for row in rows)
