"""Requests reach the upstream as they were meant: heads cleaned, and changed as the handler says."""

from __future__ import annotations

import asyncio

import pytest

from corral.contract.http import Request, Strip
from tests.support.relay import Client, ok, rig


async def test_path_method_headers_and_body_arrive_unchanged() -> None:
    async with rig() as r:
        client = await r.client()
        await client.ask(
            b"PUT /a%20b/../c?q=1&r=%2F HTTP/1.1\r\nHost: Example.com:8080\r\nX-Mixed-Case: A  b\r\n"
            b"X-Twice: 1\r\nX-Twice: 2\r\nX-Latin: \xe9\r\nX-Empty:\r\nContent-Length: 4\r\n\r\nbody"
        )
        asked = r.upstream.connections[0].requests[0]
        assert asked.start == b"PUT /a%20b/../c?q=1&r=%2F HTTP/1.1"
        assert asked.body == b"body"
        assert asked.headers[:6] == [
            (b"host", b"Example.com:8080"),
            (b"x-mixed-case", b"A  b"),
            (b"x-twice", b"1"),
            (b"x-twice", b"2"),
            (b"x-latin", b"\xe9"),
            (b"x-empty", b""),
        ]
        assert asked.get(b"content-length") == b"4"


async def test_a_handler_sees_lower_case_names_and_its_peer() -> None:
    async with rig() as r:
        client = await r.client()
        await client.ask(b"GET /p?q HTTP/1.1\r\nHost: a\r\nX-Thing:  Value \t\r\nConnection: close\r\n\r\n")
        request: Request = r.handler.requests[0]
        assert list(request.headers) == [(b"host", b"a"), (b"x-thing", b"Value")]
        assert (request.method, request.path, request.route) == (b"GET", b"/p?q", b"/p")
        assert request.header(b"x-thing") == b"Value"
        assert request.header(b"connection") is None
        assert request.peer == client.writer.get_extra_info("sockname")
        assert (request.secure, request.http_version, request.body.length) == (False, "1.1", 0)


async def test_hop_by_hop_headers_of_requests_are_removed() -> None:
    async with rig() as r:
        client = await r.client()
        await client.ask(
            b"GET / HTTP/1.1\r\nHost: a\r\nConnection: keep-alive, X-Hop\r\nX-Hop: 1\r\nKeep-Alive: 5\r\n"
            b"Proxy-Connection: x\r\nProxy-Authorization: secret\r\nTE: trailers\r\nTrailer: x\r\n"
            b"HTTP2-Settings: AAA\r\nUpgrade: foo\r\nX-End: 2\r\n\r\n"
        )
        asked = r.upstream.connections[0].requests[0]
        assert [name for name, _ in asked.headers] == [b"host", b"x-end", b"x-request-id"]


async def test_upgrade_h2c_is_dropped_and_does_not_hide_the_body() -> None:
    async with rig() as r:
        client = await r.client()
        await client.send(
            b"POST /1 HTTP/1.1\r\nHost: a\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
            b"HTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA\r\nContent-Length: 27\r\n\r\nGET /evil HTTP/1.1\r\nA: b\r\n\r"
        )
        await client.send(b"\nGET /2 HTTP/1.1\r\nHost: a\r\n\r\n"[1:])
        assert (await client.answer()).body == b"POST /1 HTTP/1.1"
        assert (await client.answer()).body == b"GET /2 HTTP/1.1"
        first = r.upstream.connections[0].requests[0]
        assert first.body == b"GET /evil HTTP/1.1\r\nA: b\r\n\r"
        assert first.get(b"upgrade") is None
        assert first.get(b"connection") is None


async def test_a_chunked_upgrade_body_is_still_a_body() -> None:
    async with rig() as r:
        client = await r.client()
        await client.ask(
            b"POST /1 HTTP/1.1\r\nHost: a\r\nConnection: upgrade\r\nUpgrade: h2c\r\nTransfer-Encoding: chunked\r\n\r\n"
            b"3\r\nabc\r\n0\r\n\r\n"
        )
        assert r.upstream.connections[0].requests[0].body == b"abc"


async def test_an_absolute_target_is_served_when_host_agrees() -> None:
    async with rig() as r:
        client = await r.client()
        answer = await client.ask(b"GET http://a:80/x?y HTTP/1.1\r\nHost: a:80\r\n\r\n")
        assert answer.body == b"GET /x?y HTTP/1.1"
        assert (await client.ask(b"GET http://b/x HTTP/1.1\r\nHost: a:80\r\n\r\n")).status == 400


async def test_a_sane_request_id_is_kept_and_any_other_replaced() -> None:
    async with rig() as r:
        client = await r.client()
        answer = await client.ask(b"GET / HTTP/1.1\r\nHost: a\r\nX-Request-ID: req-1.2:3\r\n\r\n")
        assert answer.get(b"x-request-id") == b"req-1.2:3"
        assert r.upstream.connections[0].requests[0].all(b"x-request-id") == [b"req-1.2:3"]
        assert r.handler.requests[0].request_id == "req-1.2:3"
        seen = set()
        for bad in (b"", b"X-Request-Id: a b\r\n", b"X-Request-Id: %b\r\n" % (b"x" * 129), b"X-Request-Id: \xff\r\n"):
            answer = await client.ask(b"GET / HTTP/1.1\r\nHost: a\r\n%b\r\n" % bad)
            made = answer.get(b"x-request-id")
            assert made is not None
            assert 8 <= len(made) <= 40
            assert r.upstream.connections[0].requests[-1].all(b"x-request-id") == [made]
            seen.add(made)
        assert len(seen) == 4


# What a handler changes


async def test_a_handler_changes_method_path_and_body() -> None:
    async with rig() as r:
        r.handler.options = {"method": b"POST", "path": b"/other?x", "body": b"new"}
        await (await r.client()).ask(b"GET /x HTTP/1.1\r\nHost: a\r\nX-A: 1\r\n\r\n")
        asked = r.upstream.connections[0].requests[0]
        assert (asked.start, asked.body) == (b"POST /other?x HTTP/1.1", b"new")
        assert (asked.get(b"host"), asked.get(b"x-a")) == (b"a", b"1")


async def test_a_handler_strips_and_adds_headers() -> None:
    strip = Strip(names=[b"Authorization"], prefixes=[b"X-Corral-"])
    async with rig() as r:
        r.handler.options = {"strip": strip, "add": ((b"authorization", b"Bearer ours"),)}
        client = await r.client()
        for _ in range(2):
            await client.ask(
                b"GET / HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer theirs\r\nX-Corral-Gateway: x\r\n"
                b"x-corral-client: y\r\nX-Corralled: z\r\n\r\n"
            )
            asked = r.upstream.connections[0].requests[-1]
            assert asked.all(b"authorization") == [b"Bearer ours"]
            assert [name for name, _ in asked.headers] == [b"host", b"x-corralled", b"authorization", b"x-request-id"]


async def test_a_handler_replaces_all_headers() -> None:
    async with rig() as r:
        r.handler.options = {
            "headers": [(b"x-own", b"1"), (b"connection", b"close"), (b"content-length", b"99"), (b"te", b"x")]
        }
        await (await r.client()).ask(b"POST / HTTP/1.1\r\nHost: a\r\nX-A: 1\r\nContent-Length: 2\r\n\r\nhi")
        asked = r.upstream.connections[0].requests[0]
        assert [name for name, _ in asked.headers] == [b"host", b"x-own", b"content-length", b"x-request-id"]
        assert (asked.get(b"host"), asked.body) == (b"a", b"hi")
        r.handler.options = {"headers": [(b"host", b"b")]}
        await (await r.client()).ask(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        assert r.upstream.connections[0].requests[1].all(b"host") == [b"b"]


@pytest.mark.parametrize("bad", [b"a\r\nX-Evil: 1", b"a\nb", b"a\rb", b"a\0b"])
async def test_a_handler_cannot_write_a_line_break_into_a_header(bad: bytes) -> None:
    async with rig() as r:
        client = await r.client()
        for options in (
            {"add": ((b"x-a", bad),)},
            {"headers": [(b"x-a", bad)]},
            {"response_headers": ((b"x-a", bad),)},
        ):
            r.handler.options = options
            answer = await client.ask(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
            assert answer.status == 500
            assert b"Evil" not in b"".join(name for name, _ in answer.headers)


async def test_many_clients_at_once_each_get_their_own_answer() -> None:
    async def one(client: Client, number: int) -> None:
        for turn in range(20):
            path = b"/%d/%d" % (number, turn)
            body = path * (turn % 5)
            answer = await client.ask(
                b"POST %b HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%b" % (path, len(body), body)
            )
            assert answer.body == b"POST %b HTTP/1.1" % path

    async with rig(ok) as r, asyncio.TaskGroup() as group:
        for number in range(30):
            group.create_task(one(await r.client(), number))
