"""Upgrades on trial on a real fleet: clients ask through the gateway all the time, and the new build is good, slow,
unreliable or short-lived."""

from __future__ import annotations

import contextlib
import json
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.support.backend_images import gallery_of, mock_image, openai_entry
from tests.support.fleet import Fleet
from tests.support.grown_fleet import grown_fleet
from tests.support.image_registry import ImageRegistry, push_image, registry
from tests.support.supervising import MOCK
from tests.support.waiting import wait_for

__all__ = ["registry"]

BACKEND, MODEL = "farm-mock", "asked"
CALLERS = 6
# Long enough for many requests of each build on any machine; a verdict ends it as soon as there is one.
SOAK = "20s"
# The usual one is 1.5 times as slow. A first token of the mock takes some ten milliseconds: with other tests beside
# this one, the same program needs half as long again at times.
LIMIT = ("--max-slowdown", "3")
PROMPT: Any = [{"role": "user", "content": "[[piece_delay_s=0.01]] one two three four"}]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, registry: ImageRegistry) -> Iterator[Fleet]:
    """Four machines of one hardware class, each with a replica of one model."""
    folder = tmp_path_factory.mktemp("rollouts")
    env = gallery_of(folder / "galleries", openai_entry(BACKEND, f"oci://{registry.host}/farm/mock:latest"))
    publish(registry, "one")
    with grown_fleet(folder, "barn", "byre", "shed", env=env) as fleet:
        installed = fleet.cli("backends", "install", BACKEND, timeout_s=120)
        assert installed.returncode == 0, installed.stderr
        model = {"name": MODEL, "backend": BACKEND, "parallel": 16}
        assert fleet.api("POST", "/api/models", {"definition": model}).status == 201
        schedule = {"model_name": MODEL, "spread_all": True}
        assert fleet.api("POST", "/api/nodes/scheduling", schedule).status == 200
        wait_for(lambda: len(ready(fleet)) == 4, "a replica on each node", 60)
        yield fleet


def publish(registry: ImageRegistry, version: str, **misbehaviour: str) -> None:
    program = misbehaving(**misbehaviour)
    push_image(registry.url, "farm/mock", "latest", mock_image(version, program_text=program))


def misbehaving(**misbehaviour: str) -> str:
    """The program of a build that misbehaves by itself, whatever it is asked."""
    text = (MOCK / "mock.py").read_text()
    faults = {f"MOCK_{name.upper()}": value for name, value in misbehaviour.items()}
    first = "from __future__ import annotations\n"
    assert first in text
    return text.replace(first, f"{first}\nimport os\n\nos.environ |= {json.dumps(faults)}\n", 1)


def ready(fleet: Fleet) -> list[dict[str, Any]]:
    rows = fleet.api("GET", f"/api/models/{MODEL}/replicas").json()
    return [row for row in rows if row["process_state"] == "ready"]


class Clients:
    """They ask without a pause; what failed is counted by its reason, what was answered by the version that did."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._over = threading.Event()
        self.answers: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()

    def run(self) -> None:
        with openai.OpenAI(
            base_url=self._fleet.url + "/v1", api_key=self._fleet.key, max_retries=0, timeout=60
        ) as client:
            while not self._over.is_set():
                try:
                    pieces = client.chat.completions.create(model=MODEL, messages=PROMPT, stream=True)
                    text = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
                    assert text.endswith("four"), text
                    self.answers[text.split()[1].rstrip(":")] += 1
                except (openai.APIError, AssertionError, IndexError) as error:
                    self.failures[f"{type(error).__name__}: {error}"[:200]] += 1

    def stop(self) -> None:
        self._over.set()


@contextlib.contextmanager
def asking(fleet: Fleet) -> Iterator[Clients]:
    clients = Clients(fleet)
    threads = [threading.Thread(target=clients.run, daemon=True) for _ in range(CALLERS)]
    for thread in threads:
        thread.start()
    try:
        wait_for(lambda: sum(clients.answers.values()) >= 100, "answers before the upgrade", 60)
        yield clients
    finally:
        clients.stop()
        for thread in threads:
            thread.join(timeout=90)
    assert not any(thread.is_alive() for thread in threads)


def upgrade(fleet: Fleet, *more: str, code: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The operation and its rollout, when the command has ended."""
    ran = fleet.cli("backends", "upgrade", BACKEND, "--soak", SOAK, *LIMIT, *more, "--json", timeout_s=180)
    assert ran.returncode == code, ran.stdout + ran.stderr
    (operation,) = json.loads(ran.stdout)
    shown = fleet.cli("rollouts", "show", operation["operation_id"], "--json")
    assert shown.returncode == 0, shown.stderr
    return operation, json.loads(shown.stdout)


def digests(fleet: Fleet) -> set[str]:
    """Of the builds that the four nodes say they have."""
    rows = fleet.api("GET", "/api/backends/matrix").json()["backends"]
    (row,) = [each for each in rows if each["backend"] == BACKEND]
    assert len(row["nodes"]) == 4
    return {cell["digest"] for cell in row["nodes"].values()}


BAD = {
    "slow": ({"first_delay_s": "0.5"}, "time to first token of asked"),
    "unreliable": ({"fail_every": "10"}, "failed requests of asked"),
    "short-lived": ({"dies_after_s": "4"}, "a process of the new build ended by itself"),
}


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.long
def test_a_bad_build_stops_at_one_node_and_is_taken_back(fleet: Fleet, registry: ImageRegistry, kind: str) -> None:
    before = digests(fleet)
    assert len(before) == 1
    misbehaviour, figure = BAD[kind]
    publish(registry, kind, **misbehaviour)
    with asking(fleet) as clients:
        operation, rollout = upgrade(fleet, code=1)
        assert operation["outcome"] == "reverted"
        assert figure in operation["error"]
        assert figure in rollout["verdict"]
        (state,) = rollout["classes"]
        assert len(state["nodes"]) == 4
        (revert,) = rollout["reverted_by"]
        watched = fleet.cli("ops", "watch", revert, timeout_s=120)
        assert watched.returncode == 0, watched.stdout + watched.stderr
        shown = fleet.api("GET", f"/api/operations/{revert}").json()
        assert [row["node_name"] for row in shown["nodes"]] == [state["canary"]]
        assert digests(fleet) == before
        served = sum(clients.answers.values())
        wait_for(lambda: sum(clients.answers.values()) > served + 50, "answers after the revert", 60)
    if kind == "slow":
        assert not clients.failures
    publish(registry, "one")


@pytest.mark.long
def test_a_good_build_reaches_every_node_and_no_request_fails(fleet: Fleet, registry: ImageRegistry) -> None:
    before = digests(fleet)
    publish(registry, "two")
    with asking(fleet) as clients:
        operation, rollout = upgrade(fleet, code=0)
        wait_for(lambda: clients.answers["two"] > 200, "answers of the new build", 60)
    assert not clients.failures, clients.failures
    assert {row["status"] for row in operation["nodes"]} == {"success"}
    assert rollout["phase"] == "done"
    assert rollout["classes"][0]["passed"].startswith("no figure was worse")
    assert len(digests(fleet)) == 1
    assert digests(fleet) != before
    why = fleet.api("GET", f"/api/why/operations/{operation['operation_id']}").json()
    assert any("within the limit" in line for line in why["lines"])
