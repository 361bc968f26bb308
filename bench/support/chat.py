"""A chat engine and its clients for the bench, each one Python process, as lean as such processes get.

    chat.py serve PORT
    chat.py ask HOST:PORT CONNECTIONS SECONDS plain|stream MODEL KEY    → prints an `Asked` as JSON

A request has four headers and a body of about 250 bytes, a plain answer about 700 bytes of JSON, both in several
lengths. A streamed answer has 64 chunks, and the engine makes a system call for each of them, as engines do that send
every token when they have it; all at once, because here the way between engine and client is measured.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from typing import cast

import uvloop

CHUNKS = 64
WARM_UP_S = 0.3
_TEXT = "animals are kept together in a corral, fed and counted there, and led out one by one; " * 8
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\n%b\r\n\r\n"
_PIECES_TO_LOOK_AT = 8  # bytes at the end of what came: enough for the last chunk


@dataclass(frozen=True)
class Asked:
    answers: int  # of the whole run
    faults: int
    rate: float  # answers a second, after a warm-up
    p50_ms: float
    cpu_s: float  # of this process, for the whole run


def _answer(number: int) -> bytes:
    message = {"role": "assistant", "content": _TEXT[number : number + 400 + 4 * number]}
    body = json.dumps(
        {
            "id": f"chatcmpl-{number}",
            "object": "chat.completion",
            "created": 1_700_000_000 + number,
            "model": "bench",
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 50, "completion_tokens": 90 + number, "total_tokens": 140 + number},
        }
    ).encode()
    return _HEAD % (b"application/json", b"content-length: %d" % len(body)) + body


def _chunk(data: object) -> bytes:
    line = b"data: %b\n\n" % (data.encode() if isinstance(data, str) else json.dumps(data).encode())
    return b"%x\r\n%b\r\n" % (len(line), line)


def _request(number: int, model: str, key: str, *, stream: bool) -> bytes:
    message = {"role": "user", "content": _TEXT[number : number + 120 + 4 * number]}
    body = json.dumps({"model": model, "messages": [message], "temperature": 0.7, "stream": stream}).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
        f"authorization: Bearer {key}\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


ANSWERS = [_answer(number) for number in range(16)]
MODELS = b'{"object":"list","data":[]}'
LISTED = _HEAD % (b"application/json", b"content-length: %d" % len(MODELS)) + MODELS
STREAM_HEAD = _HEAD % (b"text/event-stream", b"transfer-encoding: chunked")
CHUNK = _chunk({"id": "c", "object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {"content": " ox"}}]})
STREAM_END = _chunk("[DONE]") + b"0\r\n\r\n"


def end_of_message(data: bytes) -> int | None:
    """Of a whole message with a Content-Length, or with no body, at the beginning of `data`."""
    head = data.find(b"\r\n\r\n")
    if head < 0:
        return None
    at = data.lower().find(b"content-length: ", 0, head)
    end = head + 4
    if at >= 0:
        end += int(data[at + 16 : data.find(b"\r\n", at)])
    return end if len(data) >= end else None


class Engine(asyncio.Protocol):
    def __init__(self) -> None:
        self._unread = b""
        self._turn = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._unread += data
        while self._unread and (end := end_of_message(self._unread)) is not None:
            request, self._unread = self._unread[:end], self._unread[end:]
            self._turn += 1
            if not request.startswith(b"POST"):
                self._transport.write(LISTED)
            elif b'"stream": true' in request or b'"stream":true' in request:
                self._stream()
            else:
                self._transport.write(ANSWERS[self._turn % len(ANSWERS)])

    def _stream(self) -> None:
        """The event loop would join what is written in one of its turns."""
        fd = self._transport.get_extra_info("socket").fileno()
        pieces = [STREAM_HEAD, *[CHUNK] * CHUNKS, STREAM_END]
        for number, piece in enumerate(pieces):
            try:
                written = 0 if self._transport.get_write_buffer_size() else os.write(fd, piece)
            except BlockingIOError:
                written = 0
            if written < len(piece):
                self._transport.write(piece[written:] + b"".join(pieces[number + 1 :]))
                return


class Client(asyncio.Protocol):
    """Asks, waits for the whole answer, asks again."""

    count_from = stop_at = 0.0
    answers = counted = faults = 0
    latencies: list[float] = []  # noqa: RUF012  # one process, one list

    def __init__(self, number: int, requests: list[bytes], *, stream: bool) -> None:
        self._turn = number
        self._requests = requests
        self._stream = stream
        self._unread = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._ask()

    def _ask(self) -> None:
        self._turn += 1
        self._asked_at = time.perf_counter()
        self._transport.write(self._requests[self._turn % len(self._requests)])

    def data_received(self, data: bytes) -> None:
        if self._stream:
            is_good = not self._unread or self._unread.startswith(b"HTTP/1.1 200")
            self._unread = (self._unread or data[:12]) + data[-_PIECES_TO_LOOK_AT:]
            if not self._unread.endswith(b"\r\n0\r\n\r\n") and is_good:
                return
        else:
            self._unread = self._unread + data if self._unread else data
            end = end_of_message(self._unread)
            if end is None:
                return
        self._count(is_good=self._unread.startswith(b"HTTP/1.1 200"))
        self._unread = b""

    def _count(self, *, is_good: bool) -> None:
        now = time.perf_counter()
        Client.answers += is_good
        Client.faults += not is_good
        if Client.count_from <= now < Client.stop_at:
            Client.counted += is_good
            Client.latencies.append(now - self._asked_at)
        if now < Client.stop_at and is_good:
            self._ask()
        else:
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        Client.faults += time.perf_counter() < Client.stop_at


async def serve(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(Engine, "127.0.0.1", port, backlog=4096)
    await server.serve_forever()


async def ask(place: str, connections: int, seconds: float, *, stream: bool, model: str, key: str) -> Asked:
    host, _, port = place.rpartition(":")
    requests = [_request(number, model, key, stream=stream) for number in range(16)]
    Client.count_from = time.perf_counter() + WARM_UP_S
    Client.stop_at = Client.count_from + seconds
    loop = asyncio.get_running_loop()
    for number in range(connections):
        await loop.create_connection(lambda n=number: Client(n, requests, stream=stream), host, int(port))  # type: ignore[misc]
    await asyncio.sleep(Client.stop_at - time.perf_counter() + 0.2)
    latencies = sorted(Client.latencies) or [0.0]
    p50_ms = 1000 * latencies[len(latencies) // 2]
    return Asked(Client.answers, Client.faults, Client.counted / seconds, p50_ms, time.process_time())


def main() -> None:
    what, *words = sys.argv[1:]
    if what == "serve":
        uvloop.run(serve(int(words[0])))
        return
    place, connections, seconds, kind, model, key = words
    asked = ask(place, int(connections), float(seconds), stream=kind == "stream", model=model, key=key)
    print(json.dumps(asdict(uvloop.run(asked))))


if __name__ == "__main__":
    main()
