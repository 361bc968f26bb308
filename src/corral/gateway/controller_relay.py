"""Everything that is not the gateway's goes to the controller as it is: admin API, page, node API, live events.

The controller authenticates every call itself; all the gateway adds is where the client really is, under a key that
proves it is the gateway that says so.
"""

from __future__ import annotations

from corral.contract.http import BodyBroken, Patience, Request, Responder, Target, UpstreamFailed
from corral.gateway import answers
from corral.gateway.answers import Answer
from corral.gateway.heads import HIDDEN_FROM_CONTROLLER, for_controller
from corral.gateway.metrics import RouteCounts
from corral.gateway.relaying import send, settle, status_of

_ITS_OWN = {
    b"/controller/healthz": b"/healthz",
    b"/controller/readyz": b"/readyz",
    b"/controller/metrics": b"/metrics",
}
_WORDS = {
    503: "The controller cannot be reached right now. It is restarting or stopped; models go on being served. "
    "Try again shortly.",
    504: "The controller did not answer in time; what was asked may still happen.",
    502: "The controller broke off before it answered; what was asked may have happened.",
}


class ControllerRelay:
    def __init__(
        self, target: Target, gateway_key: str, counts: RouteCounts, *, patience: Patience, retry_after_s: float
    ) -> None:
        self._target = target
        self._gateway_key = gateway_key.encode()
        self._counts = counts
        self._patience = patience
        self._retry_after_s = retry_after_s

    async def serve(self, request: Request, responder: Responder) -> int:
        try:
            result = await responder.relay(
                self._target,
                path=controller_path(request.path),
                strip=HIDDEN_FROM_CONTROLLER,
                add=for_controller(request, self._gateway_key),
                upgrade=request.path.startswith(b"/ws/"),
                patience=self._patience,
            )
        except UpstreamFailed as failure:
            request.extra["error"] = str(failure)  # for the line in the log; the client gets the general sentence
            return await send(responder, self._unreachable(request, failure))
        except BodyBroken as error:
            return await send(
                responder, answers.corral_error(error.status, f"The body could not be read: {error}.", "invalid")
            )
        return settle(self._counts, result, result.first_byte_s)

    def _unreachable(self, request: Request, failure: UpstreamFailed) -> Answer:
        status = status_of(failure)
        if request.method == b"GET" and b"text/html" in (request.header(b"accept") or b""):
            return answers.page(status, _WORDS[status], headers=(answers.retry_after(self._retry_after_s),))
        return answers.corral_error(
            status, _WORDS[status], "unavailable", headers=(answers.retry_after(self._retry_after_s),)
        )


def controller_path(path: bytes) -> bytes:
    """The path there: its health routes stand under `/controller/` here, since the plain ones are the gateway's."""
    if not path.startswith(b"/controller/"):
        return path
    route, mark, query = path.partition(b"?")
    return _ITS_OWN.get(route, route) + mark + query
