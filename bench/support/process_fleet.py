"""The world around a gateway of several processes: a controller, ingresses and clients, each a process of its own.

    process_fleet.py controller SOCKET VIEW      answers /internal/view with that file, and takes receipts
    process_fleet.py ingress PORT                answers every request at once
    process_fleet.py clients PORT COUNT SECONDS  asks over so many connections; prints answers, faults and latencies

As lean as Python can be: they must not be what is measured.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path

import uvloop
from aiohttp import web

from bench.support.traffic import ANSWERS, BODIES, HEADERS

_WARM_UP_S = 1.0
_SAMPLE_EVERY = 16


class Ingress(asyncio.Protocol):
    def __init__(self) -> None:
        self._unread = b""
        self._turn = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._write = transport.write  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        unread = self._unread + data if self._unread else data
        while (end := _end_of_message(unread)) is not None:
            unread = unread[end:]
            self._turn += 1
            self._write(WRITTEN_ANSWERS[self._turn % len(WRITTEN_ANSWERS)])
        self._unread = unread


class Client(asyncio.Protocol):
    answers = 0
    faults = 0
    latencies: list[float] = []  # noqa: RUF012  (of all connections)
    stop_at = 0.0
    count_from = 0.0

    def __init__(self, number: int) -> None:
        self._unread = b""
        self._turn = number

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._write = transport.write  # type: ignore[attr-defined]
        self._ask()

    def _ask(self) -> None:
        self._turn += 1
        self._asked = time.perf_counter()
        self._write(WRITTEN_REQUESTS[self._turn % len(WRITTEN_REQUESTS)])

    def data_received(self, data: bytes) -> None:
        self._unread += data
        if (end := _end_of_message(self._unread)) is None:
            return
        now = time.perf_counter()
        if now >= Client.stop_at:
            self._transport.close()
            return
        if now >= Client.count_from:
            if self._unread.startswith(b"HTTP/1.1 200"):
                Client.answers += 1
            else:
                Client.faults += 1
            if self._turn % _SAMPLE_EVERY == 0:
                Client.latencies.append(now - self._asked)
        self._unread = self._unread[end:]
        self._ask()

    def connection_lost(self, exc: Exception | None) -> None:
        if time.perf_counter() < Client.stop_at:
            Client.faults += 1


def _end_of_message(data: bytes) -> int | None:
    """Of a whole message with a Content-Length, lower case, at its beginning."""
    head = data.find(b"\r\n\r\n")
    if head < 0:
        return None
    at = data.find(b"ontent-length: ", 0, head)
    if at < 0:
        at = data.find(b"ontent-Length: ", 0, head)
    length = int(data[at + 15 : data.find(b"\r\n", at)])
    end = head + 4 + length
    return end if len(data) >= end else None


def _written_request(body: str) -> bytes:
    head = {"Host": "bench", **HEADERS, "content-length": str(len(body.encode()))}
    lines = "".join(f"{name}: {value}\r\n" for name, value in head.items())
    return f"POST /v1/chat/completions HTTP/1.1\r\n{lines}\r\n{body}".encode()


def _written_answer(body: str) -> bytes:
    head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body.encode())}\r\n\r\n"
    return (head + body).encode()


WRITTEN_REQUESTS = [_written_request(body) for body in BODIES]
WRITTEN_ANSWERS = [_written_answer(body) for body in ANSWERS]


async def run_controller(socket: str, text: str) -> None:
    async def read_view(request: web.Request) -> web.Response:
        etag = {"ETag": '"1"'}
        if request.headers.get("If-None-Match") == '"1"':
            return web.Response(status=304, headers=etag)
        return web.Response(text=text, content_type="application/json", headers=etag)

    async def take_receipts(request: web.Request) -> web.Response:
        await request.read()
        return web.json_response({}, status=202)

    app = web.Application(client_max_size=1 << 30)
    app.router.add_get("/internal/view", read_view)
    app.router.add_post("/internal/receipts", take_receipts)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.UnixSite(runner, socket).start()
    await asyncio.Event().wait()


async def run_ingress(port: int) -> None:
    loop = asyncio.get_running_loop()
    await loop.create_server(Ingress, "127.0.0.1", port, backlog=4096)
    await asyncio.Event().wait()


async def run_clients(port: int, count: int, seconds: float) -> None:
    loop = asyncio.get_running_loop()
    Client.count_from = time.perf_counter() + _WARM_UP_S
    Client.stop_at = Client.count_from + seconds
    for number in range(count):
        await loop.create_connection(lambda number=number: Client(number), "127.0.0.1", port)  # type: ignore[misc]
    await asyncio.sleep(_WARM_UP_S + seconds + 0.2)
    print(json.dumps([Client.answers, Client.faults, Client.latencies]))


def main() -> None:
    what, *words = sys.argv[1:]
    if what == "controller":
        uvloop.run(run_controller(words[0], Path(words[1]).read_text()))
    elif what == "ingress":
        uvloop.run(run_ingress(int(words[0])))
    else:
        uvloop.run(run_clients(int(words[0]), int(words[1]), float(words[2])))


if __name__ == "__main__":
    main()
