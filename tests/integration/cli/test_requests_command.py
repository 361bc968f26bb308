"""`corral requests`: those under way, and names that are unknown."""

from __future__ import annotations

import json

import pytest
from aiohttp import web

from tests.integration.cli.conftest import Corral
from tests.support.scripted_fleet import node

UNDER_WAY = {
    "id": "r-1",
    "at": "2026-11-19T12:00:00Z",
    "running_ms": 12_500.0,
    "state": "running",
    "key_id": "k",
    "key": "notebook",
    "model": "fast",
    "served_by": "tiny",
    "path": "/v1/chat/completions",
    "node_id": "n",
    "node": "barn",
    "process_id": "p",
    "replica": 0,
    "tokens": 41,
}


def test_requests_under_way(corral: Corral) -> None:
    waiting = {**UNDER_WAY, "id": "r-2", "state": "waiting", "node_id": "", "node": "", "tokens": 0}
    told = {"requests": [UNDER_WAY, waiting], "total": 230}
    corral.fleet.answers["GET", "/api/requests/running"] = lambda: web.json_response(told)
    ran = corral("requests", "--running", "--model", "fast")
    header, first, second = ran.out.splitlines()
    assert header.split() == ["SINCE", "STATE", "MODEL", "KEY", "NODE", "TOKENS", "PATH", "ID"]
    assert first.split() == [
        "12.5",
        "s",
        "running",
        "fast",
        "(tiny)",
        "notebook",
        "barn",
        "~41",
        UNDER_WAY["path"],
        "r-1",
    ]
    assert "waiting" in second
    assert "230 are under way" in ran.err
    assert json.loads(corral("requests", "--running", "--json").out)[0]["tokens"] == 41


def test_none_under_way(corral: Corral) -> None:
    corral.fleet.answers["GET", "/api/requests/running"] = web.json_response({"requests": [], "total": 0})
    assert "No request is under way." in corral("requests", "--running").err


@pytest.mark.parametrize("more", [("--failed",), ("--status", "5xx"), ("--since", "1h")])
def test_what_has_not_ended_has_no_result(corral: Corral, more: tuple[str, ...]) -> None:
    ran = corral("requests", "--running", *more)
    assert ran.code != 0
    assert "have not ended" in ran.err


@pytest.mark.parametrize("more", [(), ("--watch",)])
def test_a_name_that_nothing_has_is_no_empty_list(corral: Corral, more: tuple[str, ...]) -> None:
    corral.fleet.answers["GET", "/api/requests"] = lambda: web.json_response({"requests": [], "next": ""})
    corral.fleet.answers["GET", "/api/keys"] = lambda: web.json_response([])
    corral.fleet.nodes = [node("barn")]
    for asked in (("--node", "nosuch"), ("--model", "nosuch"), ("--by", "nosuch")):
        ran = corral("requests", *asked, *more)
        assert (ran.code, ran.out) == (1, ""), asked
        assert "nosuch" in ran.err


def test_a_name_without_requests_is(corral: Corral) -> None:
    corral.fleet.answers["GET", "/api/requests"] = lambda: web.json_response({"requests": [], "next": ""})
    corral.fleet.nodes = [node("barn")]
    ran = corral("requests", "--node", "barn")
    assert (ran.code, "No requests." in ran.err) == (0, True)
