"""Which request headers the gateway removes and adds. Pure; the relay handles hop-by-hop headers and the request id.

The gateway never passes on what a client claims about itself (`X-Forwarded-*`, `X-Corral-*`).
"""

from __future__ import annotations

from corral.contract.http import Headers, Request, Strip
from corral.kit.tracing.context import TRACEPARENT, TRACESTATE, find_parent

_CLAIMS = (b"forwarded", b"x-real-ip")
_CLAIM_PREFIXES = (b"x-corral-", b"x-forwarded-")

# The controller checks the client's Authorization and cookies itself.
HIDDEN_FROM_CONTROLLER = Strip(_CLAIMS, _CLAIM_PREFIXES)
# A replica sees neither the client's secrets nor its browser: keys, cookies and cross-origin headers are removed.
_CLIENT_ONLY = (b"authorization", b"x-api-key", b"cookie", b"origin", b"referer")
HIDDEN_FROM_REPLICA = Strip((*_CLAIMS, *_CLIENT_ONLY), _CLAIM_PREFIXES)


# Where the gateway's own `traceparent` takes the place of the client's. Without a valid one of the client, its
# `tracestate` means nothing.
HIDDEN_WITH_PARENT = Strip((*HIDDEN_FROM_REPLICA.names, TRACEPARENT), HIDDEN_FROM_REPLICA.prefixes)
HIDDEN_WITHOUT_PARENT = Strip((*HIDDEN_WITH_PARENT.names, TRACESTATE), HIDDEN_FROM_REPLICA.prefixes)


def hidden_from_replica(headers: Headers) -> Strip:
    """The client's headers that a replica does not get with the gateway's own `traceparent`."""
    return HIDDEN_WITHOUT_PARENT if find_parent(headers) is None else HIDDEN_WITH_PARENT


def for_controller(request: Request, gateway_key: bytes) -> Headers:
    """Headers about the client. The key proves that the gateway wrote them."""
    headers = [
        (b"x-forwarded-proto", b"https" if request.secure else b"http"),
        (b"x-corral-gateway", gateway_key),
    ]
    host = request.header(b"host")
    if host:
        headers.append((b"x-forwarded-host", host))
    if request.peer is not None:
        headers.append((b"x-corral-client", client_ip(request.peer[0]).encode()))
    return headers


def for_replica(ingress_token: bytes, traceparent: bytes = b"") -> Headers:
    """A worker's ingress accepts a token that the controller signed. `traceparent`: in place of the client's."""
    token = (b"authorization", b"Bearer " + ingress_token)
    return (token, (TRACEPARENT, traceparent)) if traceparent else (token,)


def client_ip(host: str) -> str:
    """One spelling per client: a dual-stack socket shows IPv4 as `::ffff:192.0.2.1`, link-local addresses have a
    `%zone`."""
    return host.removeprefix("::ffff:").partition("%")[0]
