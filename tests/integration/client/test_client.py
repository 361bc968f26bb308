"""The client over real sockets: routes, shapes, errors, certificates, events."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from collections.abc import Iterator
from contextlib import aclosing, closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from aiohttp import web

from corral.client import Client, Endpoint
from corral.client.events import Changed, Lost, NodeRemoved, NodeSeen, Restarted, StateComplete
from corral.contract.admin import CreateJoinToken, CreateKey
from corral.kit import errors
from corral.kit.certificates import Ca, make_ca
from tests.support.scripted_fleet import KEY, ScriptedFleet, node, refused, scripted_fleet


@pytest.fixture
def fleet() -> Iterator[ScriptedFleet]:
    with scripted_fleet() as running:
        yield running


def client_of(fleet: ScriptedFleet, *, key: str = KEY, ca: str = "", timeout_s: float = 10.0) -> Client:
    return Client(Endpoint(fleet.url, key, ca), timeout_s=timeout_s)


async def test_nodes_are_read_and_steered_by_the_contracts_routes(fleet: ScriptedFleet) -> None:
    async with client_of(fleet) as client:
        assert [each.name for each in await client.nodes.list()] == ["attic", "cellar"]
        assert (await client.nodes.approve("cellar")).status == "healthy"
        await client.nodes.drain("attic")
        assert (await client.nodes.get("attic")).status == "draining"
        await client.nodes.resume("attic")
        await client.nodes.replace("attic")
        await client.nodes.merge_labels("attic", {"room": "top"})
        await client.nodes.remove_label("attic", "a/b")
        await client.nodes.set_budget("attic", "80%")
        await client.nodes.reset_budget("attic")
        await client.nodes.set_max_replicas("attic", 4)
        await client.nodes.reset_max_replicas("attic")
        await client.nodes.delete("attic")
    assert [call for call in fleet.calls if call[0] != "GET"] == [
        ("POST", "/api/nodes/cellar/approve", None),
        ("POST", "/api/nodes/attic/drain", None),
        ("POST", "/api/nodes/attic/resume", None),
        ("POST", "/api/nodes/attic/replace", None),
        ("PATCH", "/api/nodes/attic/labels", {"room": "top"}),
        ("DELETE", "/api/nodes/attic/labels/a%2Fb", None),
        ("PUT", "/api/nodes/attic/vram-budget", {"value": "80%"}),
        ("DELETE", "/api/nodes/attic/vram-budget", None),
        ("PUT", "/api/nodes/attic/max-replicas-per-model", {"value": 4}),
        ("DELETE", "/api/nodes/attic/max-replicas-per-model", None),
        ("DELETE", "/api/nodes/attic", None),
    ]


async def test_names_with_odd_letters_stay_one_segment_of_the_path(fleet: ScriptedFleet) -> None:
    async with client_of(fleet) as client:
        for name in ("a b/c?d#e%", ".."):
            with pytest.raises(errors.NotFound):
                await client.nodes.get(name)
    assert [call[1] for call in fleet.calls] == ["/api/nodes/a%20b%2Fc%3Fd%23e%25", "/api/nodes/%2E%2E"]


async def test_tokens_and_keys(fleet: ScriptedFleet) -> None:
    async with client_of(fleet) as client:
        made = await client.tokens.create(CreateJoinToken(uses=None, ttl_s=None, pre_approved=True))
        assert made.secret == "cj_x"
        assert (await client.tokens.list())[0].pre_approved
        await client.tokens.revoke("t1")
        key = await client.keys.create(CreateKey(name="laptop", role="viewer"))
        assert (key.secret, key.key.name) == ("ck_new", "laptop")
        await client.keys.revoke("k2")
        assert (await client.me()).role == "admin"
        assert (await client.cluster()).store == "sqlite"
    # null is said aloud: left out it would mean one use, one hour.
    assert fleet.calls[0] == ("POST", "/api/tokens", {"uses": None, "ttl_s": None, "pre_approved": True})
    assert ("POST", "/api/keys", {"name": "laptop", "role": "viewer"}) in fleet.calls


@pytest.mark.parametrize(
    ("answer", "expected", "words"),
    [
        (refused(400, "no such budget", "node_error"), errors.Invalid, "no such budget"),
        (refused(403, "viewers may not", "denied"), errors.Denied, "viewers may not"),
        (refused(409, "moved", "conflict"), errors.Conflict, "moved"),
        (refused(410, "deleted", "gone"), errors.Gone, "deleted"),
        (refused(503, "database away", "unavailable"), errors.Unavailable, "database away"),
        (refused(503, "no room", "no_capacity"), errors.NoCapacity, "no room"),
        (refused(500, "oops", "internal_error"), errors.Failed, "oops"),
        (refused(504, "silence", "outcome_unknown"), errors.OutcomeUnknown, "silence"),
        (web.Response(status=401, text='{"error":"registration token required"}'), errors.Unauthenticated, "--key"),
        (web.Response(status=502, text="<html>Bad gateway</html>"), errors.Failed, "not Corral"),
        (web.Response(status=302, headers={"Location": "http://elsewhere/"}), errors.CorralError, "HTTP 302"),
        (web.Response(status=200, text="[1, 2"), errors.Failed, "did not answer like Corral"),
    ],
)
async def test_every_refusal_becomes_a_corral_error(
    fleet: ScriptedFleet, answer: web.Response, expected: type[errors.CorralError], words: str
) -> None:
    fleet.answers[("GET", "/api/nodes")] = answer
    async with client_of(fleet) as client:
        with pytest.raises(expected, match=words):
            await client.nodes.list()


async def test_nobody_there_is_told_apart_from_no_answer() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        async with Client(Endpoint(url, KEY), timeout_s=0.2) as client:
            with pytest.raises(errors.Unreachable, match="did not answer in time"):
                await client.nodes.list()
            with pytest.raises(errors.OutcomeUnknown, match="may or may not"):
                await client.nodes.drain("attic")
    with closing(socket.socket()) as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen: nobody else can either
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        async with Client(Endpoint(url, KEY), timeout_s=30) as client:
            with pytest.raises(errors.Unreachable, match="is the fleet running"):
                await client.nodes.drain("attic")
        async with Client(Endpoint(url, KEY), is_supervised=lambda: True, restart_s=0.3) as client:
            with pytest.raises(errors.Unreachable, match="though `corral up` runs: see `corral doctor`"):
                await client.nodes.drain("attic")
        minded = iter((True, True, False))  # somebody stops it meanwhile
        async with Client(Endpoint(url, KEY), is_supervised=lambda: next(minded), restart_s=60) as client:
            with pytest.raises(errors.Unreachable, match="is the fleet running"):
                await client.nodes.drain("attic")


async def test_an_answer_that_breaks_off_is_told_without_words_about_framing(fleet: ScriptedFleet) -> None:
    async def break_off(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nA fen\r\n")
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(break_off, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, Client(Endpoint(f"http://127.0.0.1:{port}", KEY)) as client:
        with pytest.raises(errors.Unreachable, match=r"broke in the middle of the answer: try again"):
            async for _ in client.stream("/v1/chat/completions", {}):
                pass


@pytest.fixture
def secure(tmp_path: Path) -> Iterator[tuple[ScriptedFleet, Ca, Path]]:
    now = datetime.now(UTC)
    made = make_ca("test CA", now)
    ca = Ca(made.certificate_pem, made.key_pem)
    issued = ca.issue_server(["127.0.0.1"], now, life=timedelta(days=1))
    (tmp_path / "server.pem").write_text(issued.certificate_pem + issued.key_pem)
    (tmp_path / "ca.pem").write_text(ca.certificate_pem)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(tmp_path / "server.pem")
    with scripted_fleet(context) as fleet:
        fleet.ca_pem = ca.certificate_pem
        yield fleet, ca, tmp_path / "ca.pem"


async def test_https_trusts_the_ca_by_file_and_by_fingerprint(secure: tuple[ScriptedFleet, Ca, Path]) -> None:
    fleet, ca, file = secure
    for trusted in (str(file), ca.fingerprint, ca.fingerprint.upper().replace("SHA256", "sha256")):
        async with client_of(fleet, ca=trusted) as client:
            assert len(await client.nodes.list()) == 2


async def test_https_without_the_ca_sends_no_key(secure: tuple[ScriptedFleet, Ca, Path]) -> None:
    fleet, _, _ = secure
    async with client_of(fleet) as client:
        with pytest.raises(errors.Unreachable, match="is not trusted"):
            await client.nodes.list()
    assert fleet.calls == []


async def test_another_ca_than_the_pinned_one_is_refused(secure: tuple[ScriptedFleet, Ca, Path]) -> None:
    fleet, _, _ = secure
    for pem in (make_ca("somebody else", datetime.now(UTC)).certificate_pem, "<html>hello</html>", "x" * 100_000):
        fleet.ca_pem = pem
        with pytest.raises(errors.Denied, match="not the pinned one"):
            async with client_of(fleet, ca="sha256:" + "ab" * 32):
                pass
    fleet.ca_pem = ""
    with pytest.raises(errors.Unreachable, match="HTTP 404"):
        async with client_of(fleet, ca="sha256:" + "ab" * 32):
            pass
    assert all(path == "/ca.pem" for _, path, _ in fleet.calls)


async def test_a_pinned_ca_that_did_not_sign_the_server_is_refused(secure: tuple[ScriptedFleet, Ca, Path]) -> None:
    """In between sits somebody who hands out the true CA but has no certificate of it."""
    fleet, _, _ = secure
    other = Ca(*(lambda made: (made.certificate_pem, made.key_pem))(make_ca("true CA", datetime.now(UTC))))
    fleet.ca_pem = other.certificate_pem
    async with client_of(fleet, ca=other.fingerprint) as client:
        with pytest.raises(errors.Unreachable, match="is not trusted"):
            await client.nodes.list()


async def test_plain_and_tls_confused_are_told(fleet: ScriptedFleet, secure: tuple[ScriptedFleet, Ca, Path]) -> None:
    async with Client(Endpoint(fleet.url.replace("http:", "https:"), KEY, str(secure[2])), timeout_s=30) as client:
        with pytest.raises(errors.Unreachable, match="plain http"):
            await client.nodes.list()
    async with Client(Endpoint(secure[0].url.replace("https:", "http:"), KEY), timeout_s=30) as client:
        with pytest.raises(errors.Unreachable, match="the connection"):
            await client.nodes.list()


def event(name: str, data: str) -> bytes:
    return f"event: {name}\ndata: {data}\n\n".encode()


async def test_events_come_typed_and_a_broken_stream_is_opened_again(fleet: ScriptedFleet) -> None:

    attic = json.dumps(node("attic"))
    fleet.streams = [
        [b"retry: 2000\n\n", event("node", attic)[:25], event("node", attic)[25:], event("ready", "{}"), b": ping\n\n"],
        [event("ready", "{}"), event("node-removed", '{"id":"id-attic"}'), event("changed", '{"kind":"keys"}')],
        [event("something-new", "{}"), event("ready", "{}")],
    ]
    seen: list[object] = []
    async with asyncio.timeout(20), client_of(fleet) as client, aclosing(client.follow(first_s=0.01)) as events:
        async for each in events:
            seen.append(each.node.name if isinstance(each, NodeSeen) else each)
            if seen.count(StateComplete()) == 3:
                break
    assert seen == [
        *(Restarted(), "attic", StateComplete(), Lost(f"{fleet.url} ended the stream of events")),
        *(Restarted(), StateComplete(), NodeRemoved("id-attic"), Changed("keys")),
        Lost(f"{fleet.url} ended the stream of events"),
        *(Restarted(), StateComplete()),
    ]


async def test_following_gives_up_on_what_waiting_cannot_cure(fleet: ScriptedFleet) -> None:
    async with client_of(fleet, key="ck_wrong") as client:
        with pytest.raises(errors.Unauthenticated):
            async for _ in client.follow(first_s=0.01):
                pass
    fleet.streams = [[b"event: node\ndata: [nonsense\n\n"]]
    async with client_of(fleet) as client:
        with pytest.raises(errors.Failed, match="not Corral's"):
            async for _ in client.follow(first_s=0.01):
                pass


async def test_a_silent_stream_counts_as_broken(fleet: ScriptedFleet) -> None:
    async with Client(Endpoint(fleet.url, KEY), idle_s=2.0) as client:  # in which even a slow one has begun to answer
        events = client.events()
        assert await anext(events) == Restarted()
        with pytest.raises(errors.Unreachable):
            await anext(events)
