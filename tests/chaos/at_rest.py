"""What must be so when the faults of a chaos run have ended: all of it is waited for, and the rest is named."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.chaos.clients import Asked
from tests.chaos.faults import backend_processes
from tests.chaos.fleet import ChaosFleet
from tests.chaos.people import People

REST_S = 240.0
LOOK_S = 2.0


def comes_to_rest(fleet: ChaosFleet, people: People, models: Sequence[Asked]) -> list[str]:
    """Every line is something that is still wrong after some minutes without faults."""
    for member in fleet.members.values():
        member.resume()
        member.start()
    checks: tuple[Callable[[], list[str]], ...] = (
        lambda: _unhealthy(fleet),
        lambda: _forgotten(fleet, people),
        lambda: _unsettled(fleet),
        lambda: _silent_models(fleet, models),
        lambda: orphan_processes(fleet),
    )
    wrong: list[str] = ["nothing was checked"]
    until = time.monotonic() + REST_S
    while wrong and time.monotonic() < until:
        wrong = []
        for check in checks:
            try:
                wrong += check()
            except (OSError, AssertionError, KeyError, ValueError) as error:
                wrong.append(f"{type(error).__name__}: {error}"[:300])
        if wrong:
            time.sleep(LOOK_S)
    return wrong


def _unhealthy(fleet: ChaosFleet) -> list[str]:
    people_drained = [name for name, node in fleet.nodes().items() if node["status"] == "draining"]
    for name in people_drained:
        fleet.api("POST", f"/api/nodes/{name}/resume")
    return [f"{name} is {node['status']}" for name, node in fleet.nodes().items() if node["status"] != "healthy"]


def _forgotten(fleet: ChaosFleet, people: People) -> list[str]:
    lost = []
    for id in people.accepted:
        answer = fleet.api("GET", f"/api/operations/{id}")
        if answer.status == 404:
            lost.append(f"operation {id} was accepted and is not known any more")
    return lost


def _unsettled(fleet: ChaosFleet) -> list[str]:
    """Operations that have not ended. One that waits for a person (an order was refused for good) has settled."""
    open_ones = fleet.api("GET", "/api/operations").json()["operations"]
    return [
        f"{row['kind']} {row['backend']} ({row['jobID']}) has not ended: {row.get('state', '')} {row.get('error', '')}"
        for row in open_ones
        if row["kind"] and not (row.get("settled") and row.get("state") == "failing")
    ]


def _silent_models(fleet: ChaosFleet, models: Sequence[Asked]) -> list[str]:
    wrong = []
    for asked in models:
        body = {"model": asked.model, "max_tokens": 4, "messages": [{"role": "user", "content": "are you there"}]}
        answer = fleet.api("POST", "/v1/chat/completions", body)
        if answer.status != 200:
            wrong.append(f"{asked.model} answers {answer.status}: {answer.body[:200]!r}")
    return wrong


def orphan_processes(fleet: ChaosFleet) -> list[str]:
    """Backends that run and that no node lists."""
    listed: dict[str, int] = {}
    for name in fleet.machines:
        answer = fleet.api("GET", f"/api/nodes/{name}/models")
        assert answer.status == 200, answer.body
        rows = answer.json()
        listed[name] = len({row.get("process_id") or row.get("process_key") or str(row) for row in rows})
    running: dict[str, int] = dict.fromkeys(fleet.machines, 0)
    for _, worker in backend_processes(fleet):
        running[worker] += 1
    return [
        f"{name} runs {running[name]} backend processes and lists {listed[name]}"
        for name in fleet.machines
        if running[name] > listed[name]
    ]


def left_behind(fleet: ChaosFleet) -> list[str]:
    """After every process was asked to end: what still runs, and half files."""
    wrong = [f"process {pid} of {worker} outlived its worker" for pid, worker in backend_processes(fleet)]
    for name in fleet.machines:
        data = fleet.data_of(name)
        for pattern in ("backends/*/versions/*.partial", "backends/*/versions/*.tmp", "models/.blobs/incoming/*.tmp"):
            wrong += [f"{name} has left {_short(path, data)}" for path in data.glob(pattern)]
        for version in data.glob("backends/*/versions/*"):
            with contextlib.suppress(OSError):
                if version.is_dir() and not any(version.iterdir()):
                    wrong.append(f"{name} has an empty version {_short(version, data)}")
    return wrong


def _short(path: Path, data: Path) -> str:
    return str(path.relative_to(data))
