"""`/v1/responses` of processes that serve OpenAI's HTTP themselves, with repaired streams.

llama.cpp leaves fields out of the events of a stream without which OpenAI's own clients fail: `output` of the response
that `response.created` announces, and where in the answer an event belongs (`output_index`, `content_index`). They are
added here. An event that has them is passed on byte for byte, and so is every answer that is not a stream. No other
route comes through here: other answers are relayed as they are.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import aiohttp
import msgspec

from corral.contract.http import BodyTooLarge, ClientGone, Headers, Request, Responder, UpstreamFailed
from corral.inference.api_errors import ApiError, StreamBroken
from corral.inference.engine_errors import client_answer, may_be_explained
from corral.kit.tracing.context import TRACEPARENT
from corral.kit.tracing.tracer import current_span

ROUTE = b"/v1/responses"
_EVENTS = "text/event-stream"
_MAX_BODY_BYTES = 64 * 1024 * 1024
_MAX_EVENT_BYTES = 64 * 1024 * 1024
_CONNECT_S = 5.0
_DATA = b"data:"
# Headers of the connection, and headers that the relay writes itself.
_OWN_HEADERS = frozenset((b"connection", b"keep-alive", b"transfer-encoding", b"content-length", b"x-request-id"))


class Responses:
    """Forwards requests to processes on this machine. `close` it at the end."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def handle(self, request: Request, responder: Responder, base_url: str, token: str, model: str) -> int:
        """Answers, and gives the status. Raises UpstreamFailed, before anything was answered, when the process could
        not be reached or broke off."""
        try:
            body = await request.body.read(_MAX_BODY_BYTES)
        except BodyTooLarge:
            refused = ApiError(413, f"The body is larger than {_MAX_BODY_BYTES} bytes.", code="request_too_large")
            await responder.send(refused.status, refused.headers, refused.body)
            return refused.status
        sent = {"content-type": "application/json", "authorization": f"Bearer {token}"}
        span = current_span.get()
        parent = request.header(TRACEPARENT) if span is None else span.context.traceparent()
        if parent is not None:
            sent[TRACEPARENT.decode()] = parent.decode("latin-1")
        try:
            answer = await self._open().post(base_url + ROUTE.decode(), data=body, headers=sent)
        except aiohttp.ClientConnectorError as error:
            raise UpstreamFailed(f"cannot connect: {error}", refused=True) from error
        except (aiohttp.ClientError, OSError) as error:
            raise UpstreamFailed(f"the connection broke: {error}", refused=False) from error
        try:
            headers = _headers(answer)
            if may_be_explained(answer.status, headers):
                explained = client_answer(model, answer.status, await answer.read())
                await responder.send(*explained)
                return explained[0]
            await responder.stream(answer.status, headers, _pieces(answer))
        except ClientGone:
            return 499
        finally:
            answer.close()  # if it was not read to its end, the process stops generating
        return answer.status

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(
                    total=None, sock_connect=_CONNECT_S
                ),  # no total: a long prompt takes long
                connector=aiohttp.TCPConnector(limit=0, force_close=True),  # a pooled connection may be closed already
                auto_decompress=False,
            )
        return self._session


def _headers(answer: aiohttp.ClientResponse) -> Headers:
    return [(name.lower(), value) for name, value in answer.raw_headers if name.lower() not in _OWN_HEADERS]


async def _pieces(answer: aiohttp.ClientResponse) -> AsyncGenerator[bytes, None]:
    try:
        if answer.content_type != _EVENTS:
            async for piece in answer.content.iter_any():
                yield piece
            return
        repair, rest = StreamRepair(), b""
        async for piece in answer.content.iter_any():
            lines = (rest + piece).split(b"\n")
            rest = lines.pop()
            if len(rest) > _MAX_EVENT_BYTES:
                raise StreamBroken("an event without an end")
            if lines:
                yield b"".join(repair.line(line) + b"\n" for line in lines)
        yield rest
    except (aiohttp.ClientError, OSError) as error:
        raise StreamBroken(f"the process broke off: {error}") from error


class StreamRepair:
    """Adds missing fields to the events of one stream. Pure."""

    def __init__(self) -> None:
        self._number = 0  # of the next event
        self._items: dict[str, int] = {}  # item → its index in the output
        self._parts: dict[str, int] = {}  # item → the number of its parts

    def line(self, line: bytes) -> bytes:
        """One line of the stream, without its end."""
        if not line.startswith(_DATA):
            return line
        try:
            event = msgspec.json.decode(line[len(_DATA) :])
        except msgspec.DecodeError:
            return line  # `[DONE]`
        if not isinstance(event, dict) or not str(event.get("type", "")).startswith("response."):
            return line
        added = self._missing(event)
        return line if not added else b"data: " + msgspec.json.encode({**event, **added})

    def _missing(self, event: dict[str, Any]) -> dict[str, Any]:
        number = self._number
        self._number += 1
        added: dict[str, Any] = {} if "sequence_number" in event else {"sequence_number": number}
        response = event.get("response")
        if isinstance(response, dict) and "output" not in response:
            added["response"] = {**response, "output": []}
        name = event.get("item_id") or _id_of(event.get("item"))
        if name:
            place = self._items.setdefault(name, len(self._items))
            if "output_index" not in event:
                added["output_index"] = place
            if event["type"] == "response.content_part.added":
                self._parts[name] = self._parts.get(name, 0) + 1
            if "content_index" not in event and _is_of_part(event):
                added["content_index"] = max(0, self._parts.get(name, 0) - 1)
        return added


def _id_of(item: object) -> str:
    """Function calls have an id of their own, or only a call id."""
    if not isinstance(item, dict):
        return ""
    return str(item.get("id") or item.get("call_id") or "")


def _is_of_part(event: dict[str, Any]) -> bool:
    kind = str(event["type"]).removeprefix("response.")
    return kind.startswith(("content_part.", "output_text.", "refusal.", "reasoning_text."))
