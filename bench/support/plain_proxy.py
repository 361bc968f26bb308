"""The relay as a plain proxy: every request goes to one upstream. Run: `plain_proxy.py PORT HOST:PORT`."""

from __future__ import annotations

import asyncio
import sys

import uvloop

from corral.contract.http import Errand, KnownHead, Request, Responder, Target
from corral.relay import Limits, RelayServer, UpstreamPool


class PlainProxy:
    def __init__(self, target: Target) -> None:
        self._target = target
        self._errands: dict[KnownHead, Errand] = {}

    async def handle(self, request: Request, responder: Responder) -> None:
        await responder.relay(self._target)

    def decide(self, head: KnownHead, body: bytes) -> Errand | None:
        errand = self._errands.get(head)
        if errand is None:
            errand = self._errands[head] = head.errand(self._target)
        return errand

    def done(self, *told: object) -> None:
        """Nothing is counted here."""

    streamed = done

    def tap(self, errand: Errand) -> None:
        """Nothing is looked at."""

    async def carry_on(self, errand: Errand, request: Request, responder: Responder, waited_s: float) -> None:
        await responder.relay(self._target)


async def serve(port: int, target: Target) -> None:
    proxy = PlainProxy(target)
    server = RelayServer(proxy, Limits(), pool=UpstreamPool(), shortcut=proxy)
    await server.listen("127.0.0.1", port)
    await asyncio.Event().wait()


def main() -> None:
    host, _, upstream_port = sys.argv[2].rpartition(":")
    uvloop.run(serve(int(sys.argv[1]), Target(host=host, port=int(upstream_port))))


if __name__ == "__main__":
    main()
