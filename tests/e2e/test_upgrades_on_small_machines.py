"""An upgrade where no machine has the memory for both versions: another one takes the model first, and no request
waits for a process to start."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_rollouts_of_backends import BACKEND, PROMPT, asking, misbehaving
from tests.support.backend_images import gallery_of, mock_image, openai_entry
from tests.support.fleet import Fleet
from tests.support.grown_fleet import grown_fleet
from tests.support.image_registry import ImageRegistry, push_image, registry
from tests.support.waiting import wait_for

__all__ = ["registry"]

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(300),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root gives a process a memory figure of its own"),
]

MODEL = "asked"
GIB = 1 << 30
WITH_OWN_MEMORY = ("unshare", "-m", "sh", "-c", 'mount --bind "$0" /proc/meminfo && exec "$@"')
START_S = 5  # of the new build: who waits for it waits for so long


class Machine:
    """What a worker reads of its machine's memory."""

    def __init__(self, fleet: Fleet, name: str) -> None:
        self.fleet, self.name = fleet, name
        self.file = fleet.root / f"meminfo-{name}"

    def set_memory(self, *, free_gib: float) -> None:
        figures = {"MemTotal": 4 * GIB, "MemAvailable": int(free_gib * GIB), "MemFree": int(free_gib * GIB)}
        lines = Path("/proc/meminfo").read_text().splitlines()
        kept = [line for line in lines if line.partition(":")[0] not in figures]
        text = "\n".join([*(f"{name}: {size // 1024} kB" for name, size in figures.items()), *kept]) + "\n"
        with self.file.open("r+" if self.file.exists() else "w") as file:  # the same file: it is mounted
            file.write(text)
            file.truncate()

    def join(self, token: str) -> None:
        self.set_memory(free_gib=3.5)
        prefix = self.fleet.prefix
        self.fleet.prefix = (*prefix, *WITH_OWN_MEMORY, str(self.file))
        self.fleet.join(self.name, token=token)
        self.fleet.prefix = prefix

    def fill(self) -> None:
        """Its process has the memory that was reserved for it."""
        self.set_memory(free_gib=1.5)
        wait_for(lambda: self.fleet.nodes()[self.name]["available_ram"] < 2 * GIB, "the report of the memory", 60)


@pytest.fixture
def fleet(tmp_path: Path, registry: ImageRegistry) -> Iterator[Fleet]:
    env = gallery_of(tmp_path / "galleries", openai_entry(BACKEND, f"oci://{registry.host}/farm/mock:latest"))
    push_image(registry.url, "farm/mock", "latest", mock_image("one"))
    with grown_fleet(tmp_path, env=env) as fleet:
        yield fleet


def serving(fleet: Fleet) -> list[str]:
    rows = fleet.api("GET", f"/api/models/{MODEL}/replicas").json()
    names = {node["id"]: name for name, node in fleet.nodes().items()}
    return sorted(names[row["node_id"]] for row in rows if row["process_state"] == "ready")


def done(fleet: Fleet, *words: str) -> dict[str, Any]:
    ran = fleet.cli(*words, "--json", timeout_s=180)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    (operation,) = json.loads(ran.stdout)
    found: dict[str, Any] = operation
    return found


def test_another_machine_takes_the_model_first_and_no_request_waits(fleet: Fleet, registry: ImageRegistry) -> None:
    barn, shed = Machine(fleet, "barn"), Machine(fleet, "shed")
    token = fleet.token("--pre-approved", "--uses", "2")
    for machine in (barn, shed):
        machine.join(token)
    for machine in (barn, shed):
        fleet.wait_status(machine.name, "healthy", 60)
    done(fleet, "backends", "install", BACKEND, "--node", "barn")
    model = {"name": MODEL, "backend": BACKEND, "parallel": 16, "memory": "2GiB"}
    assert fleet.api("POST", "/api/models", {"definition": model}).status == 201
    loaded = fleet.cli("models", "load", MODEL, timeout_s=120)
    assert loaded.returncode == 0, loaded.stderr
    wait_for(lambda: serving(fleet) == ["barn"], "the replica on barn", 60)
    barn.fill()
    done(fleet, "backends", "install", BACKEND, "--node", "shed")
    program = misbehaving(start_delay_s=str(START_S))
    push_image(registry.url, "farm/mock", "latest", mock_image("two", program_text=program))
    plan = fleet.cli("backends", "upgrade", BACKEND, "--dry-run")
    assert f"shed takes {MODEL} first (2.0 GiB)" in plan.stdout, plan.stdout + plan.stderr
    with asking(fleet) as clients:
        operation = done(fleet, "backends", "upgrade", BACKEND)
        wait_for(lambda: clients.answers["two"] > 100, "answers of the new build", 60)
    assert not clients.failures, clients.failures
    assert Counter(row["status"] for row in operation["nodes"]) == {"success": 2}
    assert serving(fleet) == ["barn", "shed"]

    last = {"model": MODEL, "messages": PROMPT}  # not streamed: receipts of the streams arrive before this one
    assert fleet.api("POST", "/v1/chat/completions", last).status == 200
    wait_for(lambda: waits_in_receipts(fleet, streamed=False)[0], "the receipt of the last request", 60)
    requests, held, longest_us = waits_in_receipts(fleet)
    assert requests > 100
    assert held == 0, f"{held} requests waited for a process, the longest {longest_us} us"


def waits_in_receipts(fleet: Fleet, *, streamed: bool = True) -> tuple[int, int, int]:
    """Of the requests for the model: how many there were, how many waited for a process, and how long at most."""
    words = "SELECT count(*), sum(load_us > 0), max(load_us) FROM receipts WHERE model = ? AND streamed = ?"
    with contextlib.closing(sqlite3.connect(f"file:{fleet.data}/controller/corral.db?mode=ro", uri=True)) as database:
        requests, held, longest_us = database.execute(words, (MODEL, streamed)).fetchone()
    return requests, held or 0, longest_us or 0
