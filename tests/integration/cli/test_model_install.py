"""`corral models install` stays while files are fetched to the controller, and says how that ended."""

from __future__ import annotations

import json
from typing import Any

import pytest
from aiohttp import web

from tests.integration.cli.conftest import Corral

OP = "3f2a91c0-0000-4000-8000-000000000001"
INSTALL = ("POST", "/api/models")


def fetch(state: str, status: str = "downloading", **row: Any) -> dict[str, Any]:
    known = {"node_id": "controller", "node_name": "controller", "status": status, "percentage": 0}
    return {
        "id": "tiny",
        "jobID": OP,
        "kind": "fetch",
        "backend": "tiny",
        "scope": "controller",
        "state": state,
        "settled": state != "under_way",
        "message": "as it is",
        "nodes": [known | row],
    }


def install(corral: Corral, *words: str, then: list[dict[str, Any]], job: str = OP) -> Any:
    changed = {"id": "tiny", "config_revision": "1", "message": "tiny installed", "changed": True, "job_id": job}
    corral.fleet.answers[INSTALL] = web.json_response(changed, status=201)
    corral.fleet.operations.append(then[0])
    corral.fleet.wait_until_alone()
    corral.fleet.told = [then]
    return corral("models", "install", "tiny", *words)


def test_it_shows_how_far_its_files_are(corral: Corral) -> None:
    moving = fetch("under_way", percentage=50.0, phase="downloading", file_name="w.gguf", current_bytes=512, rate=9.0)
    ran = install(corral, then=[moving, fetch("done", "success", percentage=100.0)])
    assert (ran.code, ran.out.splitlines()) == (
        0,
        [
            "tiny installed",
            f"fetch tiny to the controller ({OP})",
            "controller: downloading 50% 512 B 9 B/s (w.gguf)",
            "controller: success",
            "tiny: fetched to controller",
        ],
    )
    (body,) = [body for method, path, body in corral.fleet.calls if (method, path) == INSTALL]
    assert body == {"model": "tiny", "fetch": True}


def test_what_fails_is_told_with_its_cause_and_what_to_do(corral: Corral) -> None:
    ran = install(corral, then=[fetch("failing", "error", error="there is no w.gguf")])
    assert ran.code == 1
    assert "tiny: failing on controller: there is no w.gguf; no automatic retry" in ran.out
    assert "corral ops retry 3f2a91c0" in ran.err


@pytest.mark.parametrize("words", [("--detach",), ("--detach", "--json")])
def test_detached(corral: Corral, words: tuple[str, ...]) -> None:
    ran = install(corral, *words, then=[fetch("under_way")])
    assert ran.code == 0
    if "--json" in words:
        assert json.loads(ran.out)[0]["job_id"] == OP
    else:
        assert ran.out.splitlines() == ["tiny installed", OP]
        assert "corral ops watch 3f2a91c0" in ran.err


def test_json_comes_when_it_is_over(corral: Corral) -> None:
    ran = install(corral, "--json", then=[fetch("failing", "error", error="gone")])
    assert (ran.code, [each["id"] for each in json.loads(ran.out)]) == (1, ["tiny"])


def test_nothing_to_fetch(corral: Corral) -> None:
    ran = install(corral, "--no-fetch", then=[fetch("under_way")], job="")
    assert (ran.code, ran.out) == (0, "tiny installed\n")
    (body,) = [body for method, path, body in corral.fleet.calls if (method, path) == INSTALL]
    assert body == {"model": "tiny"}
