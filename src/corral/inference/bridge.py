"""OpenAI's HTTP for one gRPC process: which path is which RPC. A `Handler` of contract/http.py.

Whoever mounts it has checked the caller and counts the request. A path without an RPC is refused by the name of the
RPC it would be.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from corral.contract.codec import encode
from corral.contract.http import BodyTooLarge, ClientGone, Request, Responder
from corral.inference import generating
from corral.inference.asked import Asked
from corral.inference.calling import Caller
from corral.inference.refusals import JSON, Refused, not_bridged
from corral.inference.served import Served

LARGEST_BODY = 64 * 1024 * 1024
Answering = Callable[[Caller, Asked, Responder], Awaitable[int]]

_JSON_ROUTES: dict[bytes, Answering] = {
    b"/v1/chat/completions": generating.chat,
    b"/v1/completions": generating.complete,
}


class Bridge:
    """Of one process. `close` it when that process is gone: the last request under way closes it in truth."""

    def __init__(self, served: Served) -> None:
        self.served = served
        self._caller = Caller(served)
        self._open = 0
        self._closing = False

    async def handle(self, request: Request, responder: Responder) -> int:
        """Answers, and tells the status for the count. Raises UpstreamFailed, before anything was answered, when the
        process could not be reached or broke off."""
        self._open += 1
        try:
            return await self._handle(request, responder)
        finally:
            self._open -= 1
            if self._closing and not self._open:
                await self._caller.close()

    async def close(self) -> None:
        self._closing = True
        if not self._open:
            await self._caller.close()

    async def _handle(self, request: Request, responder: Responder) -> int:
        try:
            return await self._route(request, responder)
        except ClientGone:
            return 499
        except BaseExceptionGroup as group:  # of several choices asked for at once, the first that failed
            failure = _first(group)
            if not isinstance(failure, Refused):
                raise failure from group
            refused = failure
        except Refused as failure:
            refused = failure
        await responder.send(refused.status, refused.headers, refused.body)
        return refused.status

    async def _route(self, request: Request, responder: Responder) -> int:
        route = request.route
        if (answer := _JSON_ROUTES.get(route)) is not None:
            if request.method != b"POST":
                raise Refused(405, "Only POST is served here.", code="method_not_allowed")
            return await answer(self._caller, await self._asked(request), responder)
        if route == b"/v1/models":
            return await self._models(responder)
        raise not_bridged("none", route.decode("latin-1"))

    async def _asked(self, request: Request) -> Asked:
        try:
            return Asked.read(await request.body.read(LARGEST_BODY))
        except BodyTooLarge as error:
            words = f"The body is larger than {LARGEST_BODY} bytes."
            raise Refused(413, words, code="request_too_large") from error

    async def _models(self, responder: Responder) -> int:
        rows = [{"id": self.served.model, "object": "model", "created": 0, "owned_by": self.served.backend}]
        await responder.send(200, (JSON,), encode({"object": "list", "data": rows}))
        return 200


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    found = group.exceptions[0]
    return _first(found) if isinstance(found, BaseExceptionGroup) else found
