"""What two parsers could read differently is refused: 400 and close, and nothing of it reaches an upstream."""

from __future__ import annotations

import pytest

from corral.relay import Limits
from tests.support.relay import quick, rig

H = b"POST / HTTP/1.1\r\nHost: a\r\n"
SMUGGLED = b"GET /smuggled HTTP/1.1\r\nHost: a\r\n\r\n"

CASES: dict[str, bytes] = {
    # Host
    "no Host": b"GET / HTTP/1.1\r\n\r\n",
    "two Hosts": b"GET / HTTP/1.1\r\nHost: a\r\nHost: a\r\n\r\n",
    "two Hosts, other case": b"GET / HTTP/1.1\r\nHost: a\r\nhOST: b\r\n\r\n",
    "empty Host": b"GET / HTTP/1.1\r\nHost:\r\n\r\n",
    "Host with a path": b"GET / HTTP/1.1\r\nHost: a/b\r\n\r\n",
    "Host with a user": b"GET / HTTP/1.1\r\nHost: u@a\r\n\r\n",
    "Host list": b"GET / HTTP/1.1\r\nHost: a, b\r\n\r\n",
    # Length
    "Content-Length twice": H + b"Content-Length: 1\r\nContent-Length: 1\r\n\r\nx",
    "Content-Length conflicting": H + b"Content-Length: 1\r\nContent-Length: 30\r\n\r\nx",
    "Content-Length conflicting, other case": H + b"content-length: 1\r\nCONTENT-LENGTH: 30\r\n\r\nx",
    "Content-Length list": H + b"Content-Length: 1, 1\r\n\r\nx",
    "Content-Length signed": H + b"Content-Length: +1\r\n\r\nx",
    "Content-Length negative": H + b"Content-Length: -1\r\n\r\nx",
    "Content-Length hexadecimal": H + b"Content-Length: 0x1\r\n\r\nx",
    "Content-Length with underscore": H + b"Content-Length: 1_0\r\n\r\nx",
    "Content-Length empty": H + b"Content-Length: \r\n\r\n",
    "Content-Length in words": H + b"Content-Length: 1 1\r\n\r\nx",
    "Content-Length beyond 63 bits": H + b"Content-Length: 9999999999999999999\r\n\r\n",
    "Content-Length in other digits": H + b"Content-Length: \xd9\xa1\r\n\r\n",
    "Content-Length with vertical tab": H + b"Content-Length: 1\x0b\r\n\r\nx",
    # Transfer-Encoding
    "CL.TE": H + b"Content-Length: 6\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nG",
    "TE.CL": H + b"Transfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n5c\r\n" + SMUGGLED,
    "TE.CL, unusual spelling": H + b"transfer-encoding: chunked\r\nCONTENT-length:4\r\n\r\n0\r\n\r\n" + SMUGGLED,
    "TE twice": H + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "TE twice, one odd": H + b"Transfer-Encoding: chunked\r\nTransfer-encoding: x\r\n\r\n0\r\n\r\n",
    "TE identity": H + b"Transfer-Encoding: identity\r\n\r\n",
    "TE gzip, chunked": H + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "TE chunked, identity": H + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    "TE chunked with parameter": H + b"Transfer-Encoding: chunked;x=1\r\n\r\n0\r\n\r\n",
    "TE xchunked": H + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "TE quoted": H + b'Transfer-Encoding: "chunked"\r\n\r\n0\r\n\r\n',
    "TE empty": H + b"Transfer-Encoding:\r\n\r\n0\r\n\r\n",
    "TE vertical tab": H + b"Transfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n",
    "TE non-breaking space": H + b"Transfer-Encoding: \xa0chunked\r\n\r\n0\r\n\r\n",
    "TE space before colon": H + b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
    "TE tab before colon": H + b"Transfer-Encoding\t: chunked\r\n\r\n0\r\n\r\n",
    "TE folded": H + b"Transfer-Encoding:\r\n chunked\r\n\r\n0\r\n\r\n",
    "TE after a lone LF": H + b"X: a\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "TE after a lone CR": H + b"X: a\rTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "TE behind NUL": H + b"Transfer-Encoding: chunked\x00\r\n\r\n0\r\n\r\n",
    "TE in HTTP/1.0": b"POST / HTTP/1.0\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "TE nominated": H + b"Connection: content-length\r\nContent-Length: 5\r\n\r\nhello",
    "Host nominated": b"GET / HTTP/1.1\r\nHost: a\r\nConnection: Host\r\n\r\n",
    # Fields
    "folded header": H + b"X: a\r\n b\r\n\r\n",
    "folded first header": b"GET / HTTP/1.1\r\n Host: a\r\n\r\n",
    "space before colon": H + b"X : a\r\n\r\n",
    "no colon": H + b"X\r\n\r\n",
    "empty name": H + b": a\r\n\r\n",
    "space in name": H + b"X Y: a\r\n\r\n",
    "control byte in value": H + b"X: a\x01b\r\n\r\n",
    "NUL in value": H + b"X: a\x00b\r\n\r\n",
    "DEL in value": H + b"X: a\x7fb\r\n\r\n",
    "byte over 127 in name": H + b"X\xe9: a\r\n\r\n",
    "lone LF in value": H + b"X: a\nb\r\n\r\n",
    "lone CR in value": H + b"X: a\rb\r\n\r\n",
    "lone LF lines": b"GET / HTTP/1.1\nHost: a\n\n",
    "lone LF at the end": b"GET / HTTP/1.1\r\nHost: a\r\n\n",
    "lone CR lines": b"GET / HTTP/1.1\rHost: a\r\r",
    # Request line
    "two spaces": b"GET  / HTTP/1.1\r\nHost: a\r\n\r\n",
    "tab": b"GET\t/ HTTP/1.1\r\nHost: a\r\n\r\n",
    "space in target": b"GET /a b HTTP/1.1\r\nHost: a\r\n\r\n",
    "control byte in target": b"GET /a\x01 HTTP/1.1\r\nHost: a\r\n\r\n",
    "byte over 127 in target": b"GET /\xe9 HTTP/1.1\r\nHost: a\r\n\r\n",
    "fragment": b"GET /a#b HTTP/1.1\r\nHost: a\r\n\r\n",
    "relative target": b"GET a HTTP/1.1\r\nHost: a\r\n\r\n",
    "target of CONNECT": b"CONNECT a:443 HTTP/1.1\r\nHost: a\r\n\r\n",
    "asterisk": b"GET * HTTP/1.1\r\nHost: a\r\n\r\n",
    "other host in target": b"GET http://b/ HTTP/1.1\r\nHost: a\r\n\r\n",
    "no version": b"GET /\r\nHost: a\r\n\r\n",
    "small http": b"GET / http/1.1\r\nHost: a\r\n\r\n",
    "version with more digits": b"GET / HTTP/1.10\r\nHost: a\r\n\r\n",
    "leading space": b" GET / HTTP/1.1\r\nHost: a\r\n\r\n",
    "bad method": b"G(T / HTTP/1.1\r\nHost: a\r\n\r\n",
    "too many empty lines": b"\r\n" * 9 + b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "garbage": b"\x00\x01\x02\x03",
}


@pytest.mark.parametrize("name", CASES)
async def test_400_and_close(name: str) -> None:
    async with rig() as r:
        client = await r.client()
        await client.send(CASES[name] + SMUGGLED)
        answer = await client.answer()
        assert answer.status == 400, answer
        assert answer.get(b"connection") == b"close"
        assert answer.body.startswith(b'{"error":{"code":400,"message":"')
        await client.closed()
        assert not r.handler.requests
        assert not r.upstream.connections
        assert r.server.counters.malformed == 1


@pytest.mark.parametrize("name", CASES)
async def test_400_and_close_also_after_a_good_request_that_came_along(name: str) -> None:
    async with rig() as r:
        client = await r.client()
        await client.send(b"GET /good HTTP/1.1\r\nHost: a\r\n\r\n" + CASES[name])
        assert (await client.answer()).status == 200
        assert (await client.answer()).status == 400
        await client.closed()
        assert len(r.upstream.connections[0].requests) == 1


@pytest.mark.parametrize("method", [b"TRACE", b"CONNECT", b"PROPFIND", b"BREW", b"get"])
async def test_methods_that_are_not_implemented_reach_nobody(method: bytes) -> None:
    """An upstream would answer them in its own words; to TRACE, with the credentials that were added for it."""
    async with rig() as r:
        client = await r.client()
        await client.send(method + b" / HTTP/1.1\r\nHost: a\r\n\r\n" + SMUGGLED)
        answer = await client.answer()
        assert answer.status == 501, answer
        assert answer.get(b"content-type") == b"application/json"
        assert answer.body.startswith(b'{"error":{"code":501,"message":"')
        await client.closed()
        assert not r.handler.requests
        assert not r.upstream.connections


CHUNK_CASES: dict[str, bytes] = {
    "size with 0x": b"0x3\r\nabc\r\n0\r\n\r\n",
    "size signed": b"+3\r\nabc\r\n0\r\n\r\n",
    "size negative": b"-3\r\nabc\r\n0\r\n\r\n",
    "size with underscore": b"1_0\r\n0123456789abcdef\r\n0\r\n\r\n",
    "size empty": b"\r\nabc\r\n0\r\n\r\n",
    "size only extension": b";a\r\nabc\r\n0\r\n\r\n",
    "space before size": b" 3\r\nabc\r\n0\r\n\r\n",
    "space after size": b"3 \r\nabc\r\n0\r\n\r\n",
    "size beyond 60 bits": b"1000000000000000\r\nabc\r\n0\r\n\r\n",
    "lone LF after size": b"3\nabc\r\n0\r\n\r\n",
    "lone CR after size": b"3\rabc\r\n0\r\n\r\n",
    "lone LF in extension": b"3;a\nb\r\nabc\r\n0\r\n\r\n",
    "control byte in extension": b"3;a\x00\r\nabc\r\n0\r\n\r\n",
    "extension without end": b"3;" + b"x" * 300,
    "data longer than size": b"3\r\nabcd\r\n0\r\n\r\n",
    "data shorter than size": b"5\r\nabc\r\n0\r\n\r\n",
    "lone LF after data": b"3\r\nabc\n0\r\n\r\n",
    "two CRs after data": b"3\r\nabc\r\r\n0\r\n\r\n",
    "letters": b"xyz\r\n",
    "trailer without colon": b"0\r\nabc\r\n\r\n",
    "trailer with control byte": b"0\r\na: \x01\r\n\r\n",
    "trailer folded": b"0\r\na: b\r\n c\r\n\r\n",
    "trailer with lone LF": b"0\r\na: b\nc: d\r\n\r\n",
    "trailers without end": b"0\r\n" + b"a: b\r\n" * 2000,
}


@pytest.mark.parametrize("name", CHUNK_CASES)
@pytest.mark.parametrize("together", [True, False])
async def test_chunk_games_are_400_and_close(name: str, together: bool) -> None:
    async with rig() as r:
        client = await r.client()
        head = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
        if together:
            await client.send(head + CHUNK_CASES[name] + b"\r\n" + SMUGGLED)
        else:
            await client.send(head)
            await r.until(lambda: r.upstream.connections)
            await client.send(CHUNK_CASES[name] + b"\r\n" + SMUGGLED)
        answer = await client.answer()
        assert (answer.status, answer.get(b"connection")) == (400, b"close")
        await client.closed()
        assert all(not served.requests for served in r.upstream.connections)
        assert r.pool.idle_count(r.upstream.target) == 0  # a connection with half a body is used for nothing else


async def test_unknown_versions_are_505() -> None:
    async with rig() as r:
        for line in (b"PRI * HTTP/2.0", b"GET / HTTP/3.0", b"GET / HTTP/1.2", b"GET / HTTP/0.9"):
            answer = await (await r.client()).ask(line + b"\r\nHost: a\r\n\r\n")
            assert (answer.status, answer.get(b"connection")) == (505, b"close")


async def test_an_unknown_expectation_is_417() -> None:
    async with rig() as r:
        answer = await (await r.client()).ask(H + b"Expect: 200-ok\r\nContent-Length: 1\r\n\r\n")
        assert (answer.status, answer.get(b"connection")) == (417, b"close")


async def test_a_head_over_the_limit_is_431() -> None:
    async with rig(limits=Limits(head_bytes=1000, timeouts=quick())) as r:
        pad = b"GET / HTTP/1.1\r\nHost: a\r\nX-Pad: %b\r\n\r\n"
        assert (await (await r.client()).ask(pad % (b"p" * 900))).status == 200
        for size in (1000, 100_000):
            client = await r.client()
            answer = await client.ask(pad % (b"p" * size))
            assert (answer.status, answer.get(b"connection")) == (431, b"close")
            await client.closed()


async def test_an_endless_head_is_431_as_soon_as_it_is_too_long() -> None:
    async with rig(limits=Limits(head_bytes=1000, timeouts=quick())) as r:
        client = await r.client()
        await client.send(b"GET / HTTP/1.1\r\nHost: a\r\n")
        for _ in range(100):
            client.writer.write(b"X-More: and more\r\n")
        assert (await client.answer()).status == 431


async def test_the_default_limit_of_a_head_is_64_kib() -> None:
    async with rig() as r:
        pad = b"GET / HTTP/1.1\r\nHost: a\r\nX-Pad: %b\r\n\r\n"
        assert (await (await r.client()).ask(pad % (b"p" * 65_000))).status == 200
        assert (await (await r.client()).ask(pad % (b"p" * 66_000))).status == 431


async def test_too_many_header_fields_are_431() -> None:
    async with rig(limits=Limits(header_count=10, timeouts=quick())) as r:
        client = await r.client()
        await client.ask(b"GET / HTTP/1.1\r\nHost: a\r\n" + b"X: y\r\n" * 9 + b"\r\n")
        assert (await client.ask(b"GET / HTTP/1.1\r\nHost: a\r\n" + b"X: y\r\n" * 10 + b"\r\n")).status == 431


async def test_a_refusal_says_nothing_of_what_was_sent() -> None:
    async with rig() as r:
        answer = await (await r.client()).ask(b"GET /secret-path HTTP/1.1\r\nHost: a\r\nBad Secret: x\r\n\r\n")
        assert b"ecret" not in answer.body
