"""New revisions of a model on trial on a real fleet: clients ask through the gateway all the time, and the backend of
the new revision is good, slow or unreliable."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.test_rollouts_of_backends import LIMIT, MODEL, asking, misbehaving, ready
from tests.support.backend_images import gallery_of, mock_image, openai_entry
from tests.support.fleet import Fleet
from tests.support.grown_fleet import grown_fleet
from tests.support.image_registry import ImageRegistry, push_image, registry
from tests.support.waiting import wait_for

__all__ = ["registry"]

SOAK = "60s"
BACKENDS: dict[str, dict[str, str]] = {
    "steady": {},
    "better": {},
    "slow": {"first_delay_s": "0.5"},
    "unreliable": {"fail_every": "10"},
}
FIGURES = {"slow": "time to first token of asked", "unreliable": "failed requests of asked"}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, registry: ImageRegistry) -> Iterator[Fleet]:
    """Two machines, and one model that serves on one of them."""
    folder = tmp_path_factory.mktemp("trials")
    for name, faults in BACKENDS.items():
        push_image(registry.url, f"farm/{name}", "latest", mock_image(name, program_text=misbehaving(**faults)))
    entries = [openai_entry(name, f"oci://{registry.host}/farm/{name}:latest") for name in BACKENDS]
    with grown_fleet(folder, "barn", env=gallery_of(folder / "galleries", *entries)) as fleet:
        model = {"name": MODEL, "backend": "steady", "parallel": 16}
        assert fleet.api("POST", "/api/models", {"definition": model}).status == 201
        assert fleet.api("POST", f"/api/models/{MODEL}/load").status == 202
        wait_for(lambda: len(ready(fleet)) == 1, "a replica", 120)
        yield fleet


def edit(fleet: Fleet, backend: str, *, code: int) -> dict[str, Any]:
    """The rollout, when the command has ended."""
    change = ("--set", f"backend={backend}", "--set", "parallel=16")
    ran = fleet.cli("models", "edit", MODEL, *change, "--soak", SOAK, *LIMIT, "--json", timeout_s=240)
    assert ran.returncode == code, ran.stdout + ran.stderr
    rollout: dict[str, Any] = fleet.api("GET", f"/api/rollouts/{json.loads(ran.stdout)['rollout_id']}").json()
    return rollout


def revision(fleet: Fleet) -> str:
    return str(fleet.api("GET", f"/api/models/{MODEL}").json()["config_revision"])


def failed_requests(fleet: Fleet) -> list[dict[str, Any]]:
    return list(fleet.api("GET", f"/api/requests?model={MODEL}&failed=true&limit=500").json()["requests"])


@pytest.mark.parametrize("backend", FIGURES)
@pytest.mark.long
def test_a_worse_revision_is_taken_back_and_only_its_share_suffers(fleet: Fleet, backend: str) -> None:
    before, failed_before = revision(fleet), len(failed_requests(fleet))
    with asking(fleet) as clients:
        rollout = edit(fleet, backend, code=1)
        assert FIGURES[backend] in rollout["verdict"]
        assert revision(fleet) == before
        served = sum(clients.answers.values())
        wait_for(lambda: sum(clients.answers.values()) > served + 50, "answers after the revert", 60)
        wait_for(lambda: len(ready(fleet)) == 1, "the end of the trial's replica", 60)
    failures = sum(clients.failures.values())
    if backend == "slow":
        assert not failures, clients.failures

    def told() -> bool:
        return len(failed_requests(fleet)) - failed_before == failures

    wait_for(told, f"receipts of {failures} failed requests", 30)
    assert {each["revision"] for each in failed_requests(fleet)[:failures]} <= {rollout["revision"]}
    why = fleet.cli("why", "rollout", rollout["operation_id"], "--json")
    assert any(FIGURES[backend] in line and line.endswith("worse") for line in json.loads(why.stdout)["lines"])


@pytest.mark.long
def test_a_good_revision_replaces_the_old_one_and_no_request_fails(fleet: Fleet) -> None:
    before = revision(fleet)
    with asking(fleet) as clients:
        rollout = edit(fleet, "better", code=0)
        served = sum(clients.answers.values())
        wait_for(lambda: sum(clients.answers.values()) > served + 50, "answers of the new revision", 60)
    assert not clients.failures, clients.failures
    assert rollout["phase"] == "done"
    assert rollout["classes"][0]["passed"].startswith("no figure was worse")
    assert revision(fleet) == rollout["revision"] != before
    wait_for(lambda: [each["backend_type"] for each in ready(fleet)] == ["better"], "the end of the old replica", 60)
