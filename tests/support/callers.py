"""Callers of replicas that go by what the nodes say runs there, as a gateway does, each in a thread of its own.

with process_table(fleet) as table, calling(fleet, table, "barn") as caller:
    wait_for(lambda: "two" in caller.heard, "answer of the new version")
assert caller.failures == []
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

from tests.support.fleet import Fleet, http
from tests.support.grown_fleet import bus_of, ingress_token
from tests.support.waiting import DEADLINE_S, wait_for


class ProcessTable:
    """What the last heartbeat of each node lists, by the node's id."""

    def __init__(self) -> None:
        self._processes: dict[str, list[dict[str, Any]]] = {}

    def ready(self, node_id: str, model: str = "m") -> list[str]:
        """The process ids to which requests for it may go."""
        rows = self._processes.get(node_id, [])
        return [row["process_id"] for row in rows if row["model"] == model and row["state"] == "ready"]

    async def keep(self, message: Any) -> None:
        told = json.loads(message.data)
        if "processes" in told:
            self._processes[message.subject.split(".")[1]] = told["processes"]


@contextlib.contextmanager
def process_table(fleet: Fleet) -> Iterator[ProcessTable]:
    table, loop, over = ProcessTable(), asyncio.new_event_loop(), asyncio.Event()
    listening = threading.Event()

    async def listen() -> None:
        async with bus_of(fleet) as bus:
            await bus.subscribe("nodes.*.heartbeat", cb=table.keep)
            await bus.flush()
            listening.set()
            await over.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(listen()), name="process table", daemon=True)
    thread.start()
    try:
        assert listening.wait(DEADLINE_S)
        yield table
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join(timeout=30)
        loop.close()


class Caller:
    """Asks one node's replica again and again. A process that answers 410 has been replaced: the caller asks the next
    one the node names, with the same request. Anything else but an answer is a failure."""

    def __init__(self, fleet: Fleet, table: ProcessTable, node: str) -> None:
        known = fleet.nodes()[node]
        self.node = node
        self._id, self._url, self._trust = known["id"], known["ingress_url"], fleet.trust
        self._token = ingress_token(fleet, known["id"])
        self._table = table
        self._over = threading.Event()
        self._gone: set[str] = set()
        self.failures: list[str] = []
        self.heard: dict[str, int] = {}  # how many answers had this version
        self.asked = 0

    def run(self) -> None:
        while not self._over.is_set():
            self.asked += 1
            try:
                version = self._ask()
            except (OSError, AssertionError, KeyError, ValueError) as error:
                self.failures.append(f"{self.node}, request {self.asked}: {error!r}")
            else:
                self.heard[version] = self.heard.get(version, 0) + 1

    def stop(self) -> None:
        self._over.set()

    def _ask(self) -> str:
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            process_id = wait_for(self._pick, f"process of {self.node} to ask")
            body = {"model": "m", "messages": [{"role": "user", "content": "how are you [[piece_delay_s=0.02]]"}]}
            path = f"/replicas/{process_id}/v1/chat/completions"
            answer = http("POST", self._url + path, key=self._token, body=body, trust=self._trust)
            if answer.status == 410:
                self._gone.add(process_id)
                continue
            assert answer.status == 200, (process_id, answer.status, answer.body)
            text = str(answer.json()["choices"][0]["message"]["content"])
            assert text.endswith("how are you"), text
            return text.split()[1].rstrip(":")
        raise AssertionError("every process it was sent to was gone")

    def _pick(self) -> str:
        return next((each for each in self._table.ready(self._id) if each not in self._gone), "")


@contextlib.contextmanager
def calling(fleet: Fleet, table: ProcessTable, *nodes: str) -> Iterator[list[Caller]]:
    callers = [Caller(fleet, table, node) for node in nodes]
    threads = [threading.Thread(target=each.run, name=f"caller of {each.node}", daemon=True) for each in callers]
    for thread in threads:
        thread.start()
    try:
        yield callers
    finally:
        for each in callers:
            each.stop()
        for thread in threads:
            thread.join(timeout=60)
