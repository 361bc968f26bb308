"""Relays all other paths to the controller unchanged: admin API, web page, node API, live events.

The controller authenticates every call itself. The gateway only adds the client's address, with a key that proves that
the gateway sent it.
"""

from __future__ import annotations

from corral.contract.http import BodyBroken, Patience, Request, Responder, Target, UpstreamFailed
from corral.gateway import responses
from corral.gateway.http.headers import HIDDEN_FROM_CONTROLLER, for_controller
from corral.gateway.receipts.metrics import RouteCounts
from corral.gateway.responses import Response

_STATUS_PATHS = {
    b"/controller/healthz": b"/healthz",
    b"/controller/readyz": b"/readyz",
    b"/controller/metrics": b"/metrics",
}
_FAILURE_MESSAGES = {
    503: "The controller cannot be reached right now. It is restarting or stopped; models are still served. "
    "Try again shortly.",
    504: "The controller did not answer in time; the requested action may still happen.",
    502: "The connection to the controller broke before it answered; the requested action may have happened.",
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
            request.extra["error"] = str(failure)  # for the log line; the client gets a general message
            return await responses.send(responder, self._unreachable(request, failure))
        except BodyBroken as error:
            return await responses.send(
                responder, responses.corral_error(error.status, f"The body could not be read: {error}.", "invalid")
            )
        return self._counts.count_relayed(result, result.first_byte_s)

    def _unreachable(self, request: Request, failure: UpstreamFailed) -> Response:
        status = responses.status_for(failure)
        if request.method == b"GET" and b"text/html" in (request.header(b"accept") or b""):
            return responses.page(
                status, _FAILURE_MESSAGES[status], headers=(responses.retry_after(self._retry_after_s),)
            )
        return responses.corral_error(
            status, _FAILURE_MESSAGES[status], "unavailable", headers=(responses.retry_after(self._retry_after_s),)
        )


def controller_path(path: bytes) -> bytes:
    """The controller's path: its status routes are under `/controller/` here, because the plain ones are the
    gateway's."""
    if not path.startswith(b"/controller/"):
        return path
    route, mark, query = path.partition(b"?")
    return _STATUS_PATHS.get(route, route) + mark + query
