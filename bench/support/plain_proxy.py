"""The relay as a plain proxy: every request goes to one upstream. Run: `plain_proxy.py PORT HOST:PORT`."""

from __future__ import annotations

import asyncio
import sys

import uvloop

from corral.contract.http import KnownHead, PreparedForward, Request, Responder, Target
from corral.relay import Limits, RelayServer, UpstreamPool


class PlainProxy:
    def __init__(self, target: Target) -> None:
        self._target = target
        self._forwards: dict[KnownHead, PreparedForward] = {}

    async def handle(self, request: Request, responder: Responder) -> None:
        await responder.relay(self._target)

    def decide(self, head: KnownHead, body: bytes, traceparent: bytes) -> PreparedForward | None:
        forward = self._forwards.get(head)
        if forward is None:
            forward = self._forwards[head] = head.prepare_forward(self._target)
        return forward

    def on_response(self, *_report: object) -> None:
        """Nothing is counted here."""

    on_stream_end = on_response

    def new_tap(self, forward: PreparedForward) -> None:
        """Nothing is looked at."""

    async def handle_prepared(
        self, forward: PreparedForward, request: Request, responder: Responder, elapsed_s: float
    ) -> None:
        await responder.relay(self._target)


async def serve(port: int, target: Target) -> None:
    proxy = PlainProxy(target)
    server = RelayServer(proxy, Limits(), pool=UpstreamPool(), fast_path=proxy)
    await server.listen("127.0.0.1", port)
    await asyncio.Event().wait()


def main() -> None:
    host, _, upstream_port = sys.argv[2].rpartition(":")
    uvloop.run(serve(int(sys.argv[1]), Target(host=host, port=int(upstream_port))))


if __name__ == "__main__":
    main()
