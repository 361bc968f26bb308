"""CORS: which web pages may call `/v1/…` from a browser. Off unless origins are set. Pure.

The controller's routes have no CORS: they accept a cookie, which no other origin may use.
"""

from __future__ import annotations

from collections.abc import Sequence

from corral.contract.http import Headers, Request
from corral.gateway.responses import Response

ANY = "*"
_VARY = (b"vary", b"Origin")
_EXPOSED = (
    b"access-control-expose-headers",
    b"X-Request-Id, Retry-After, X-Corral-Model, X-Corral-Node, X-LocalAI-Node",
)


class Cors:
    def __init__(self, origins: Sequence[str] = (), *, max_age_s: float = 600.0) -> None:
        self.enabled = bool(origins)
        self._any = ANY in origins
        self._origins = frozenset(origin.rstrip("/").encode() for origin in origins)
        self._max_age = str(round(max_age_s)).encode()

    def headers(self, request: Request) -> Headers:
        """The headers to add to a response."""
        if not self.enabled:
            return ()
        if self._any:
            return ((b"access-control-allow-origin", b"*"), _EXPOSED)
        origin = request.header(b"origin")
        if origin is None or origin not in self._origins:
            return (_VARY,)
        return ((b"access-control-allow-origin", origin), _EXPOSED, _VARY)

    def preflight(self, request: Request) -> Response | None:
        """The response to a preflight request, which carries no key; None if `request` is none."""
        if request.method != b"OPTIONS" or not self.enabled:
            return None
        if request.header(b"access-control-request-method") is None:
            return None
        wanted = request.header(b"access-control-request-headers") or b"authorization, content-type"
        return Response(
            204,
            b"",
            (
                (b"access-control-allow-methods", b"GET, POST, OPTIONS"),
                (b"access-control-allow-headers", wanted),
                (b"access-control-max-age", self._max_age),
            ),
        )
