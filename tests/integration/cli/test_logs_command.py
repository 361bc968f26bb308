"""`corral logs`: of a model wherever it runs, of one node, followed, and what is said when there is nothing."""

from __future__ import annotations

import json

import pytest
from aiohttp import web

from tests.integration.cli.conftest import Corral
from tests.support.scripted_fleet import node, refused

AT = "2026-11-16T10:00:00.5Z"
AT_SECOND = "2026-11-16T10:00:00Z"


def lines(*texts: str) -> list[dict[str, str]]:
    return [{"timestamp": AT, "stream": "stderr", "text": text} for text in texts]


def names(corral: Corral, name: str, *told: str) -> None:
    corral.fleet.answers[("GET", f"/api/nodes/{name}/backend-logs")] = web.json_response(list(told))


def door(name: str, what: str) -> tuple[str, str]:
    return "GET", f"/api/nodes/{name}/backend-logs/{what}"


def test_of_a_model_on_the_nodes_where_it_wrote_something(corral: Corral) -> None:
    corral.fleet.nodes = [node("attic"), node("barn"), node("gone", "offline"), node("shed")]
    names(corral, "attic", "tiny", "tiny#1")
    names(corral, "barn", "tiny")
    names(corral, "shed", "other")
    corral.fleet.answers |= {
        door("attic", "tiny"): web.json_response(lines("loaded", "a\x1b[2J\tb")),
        door("barn", "tiny"): web.json_response(lines("ready")),
    }
    ran = corral("logs", "tiny")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.splitlines() == ["attic: loaded", "attic: a\ufffd[2J    b", "barn: ready"]


def test_of_one_node_nobody_else_is_asked(corral: Corral) -> None:
    corral.fleet.answers[door("barn", "tiny%231")] = web.json_response(lines("ready"))
    ran = corral("logs", "tiny#1@barn", "--tail", "20", "--json")
    told = {"node": "barn", "timestamp": AT, "stream": "stderr", "text": "ready"}
    assert [json.loads(line) for line in ran.out.splitlines()] == [told]
    assert [path for _, path, _ in corral.fleet.calls] == ["/api/nodes/barn/backend-logs/tiny%231"]


def test_followed_until_it_ends(corral: Corral) -> None:
    body = "\n".join(json.dumps(line) for line in lines("one", "two")) + "\n\n"
    corral.fleet.answers[door("barn", "tiny")] = web.Response(text=body, content_type="application/x-ndjson")
    ran = corral("logs", "tiny@barn", "-f")
    assert (ran.code, ran.out) == (0, "one\ntwo\n")
    assert "ended" in ran.err


def test_nothing_to_show_is_told(corral: Corral) -> None:
    corral.fleet.nodes = [node("attic"), node("barn")]
    names(corral, "attic", "other")
    corral.fleet.answers[("GET", "/api/nodes/barn/backend-logs")] = refused(502, "barn does not answer", "failed")
    ran = corral("logs", "tiny")
    assert (ran.code, ran.out) == (1, "")
    assert ran.err.splitlines() == [
        "corral: barn does not answer",
        "corral: no node that answers has a log of 'tiny'; `corral models list` and `corral backends list` list names",
    ]


@pytest.mark.parametrize(("asked", "where"), [("tiny#9", "attic, barn"), ("tyni@barn", "barn")])
def test_a_replica_or_a_node_without_a_word_is_told_as_such(corral: Corral, asked: str, where: str) -> None:
    corral.fleet.nodes = [node("attic"), node("barn")]
    for each in ("attic", "barn"):
        names(corral, each, "tiny")
        corral.fleet.answers |= {door(each, what): web.json_response([]) for what in ("tiny%239", "tyni")}
    ran = corral("logs", asked)
    assert (ran.code, ran.out) == (1, "")
    assert ran.err == f"corral: the log of {asked.partition('@')[0]!r} is empty on {where}\n"


def test_no_line_is_asked_for_and_none_is_missed(corral: Corral) -> None:
    corral.fleet.answers[door("barn", "tiny")] = web.json_response([])
    ran = corral("logs", "tiny@barn", "--tail", "0")
    assert (ran.code, ran.out, ran.err) == (0, "", "")


def test_the_log_of_a_worker(corral: Corral) -> None:
    corral.fleet.answers["GET", "/api/nodes/barn/log"] = web.json_response(lines("worker starts"))
    ran = corral("logs", "--node", "barn", "--worker", "--tail", "5")
    assert (ran.code, ran.out, ran.err) == (0, f"{AT_SECOND} worker starts\n", "")
    body = json.dumps(lines("one")[0]) + "\n"
    corral.fleet.answers["GET", "/api/nodes/barn/log"] = web.Response(text=body, content_type="application/x-ndjson")
    assert corral("logs", "--node", "barn", "--worker", "-f").out == f"{AT_SECOND} one\n"


def test_a_worker_that_offers_no_log_says_why(corral: Corral) -> None:
    why = "barn is a LocalAI worker, which offers only the logs of its backends; read its own log on that machine"
    corral.fleet.answers["GET", "/api/nodes/barn/log"] = refused(404, why, "not_found")
    ran = corral("logs", "--node", "barn", "--worker")
    assert (ran.code, ran.out, ran.err) == (1, "", f"corral: {why}\n")


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (("--worker",), "--worker needs a node"),
        (("tiny", "--worker", "--node", "barn"), "not both"),
        (("tiny@barn", "--node", "attic"), "either on barn or on attic"),
        (("--node", "barn"), "or --node NAME --worker"),
    ],
)
def test_what_cannot_be_asked_for(corral: Corral, asked: tuple[str, ...], said: str) -> None:
    ran = corral("logs", *asked)
    assert ran.code != 0
    assert said in ran.err


def test_a_node_by_its_option(corral: Corral) -> None:
    corral.fleet.answers[door("barn", "tiny")] = web.json_response(lines("ready"))
    assert corral("logs", "tiny", "--node", "barn").out == "ready\n"
