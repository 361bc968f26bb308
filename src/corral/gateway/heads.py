"""Which headers go on, and which end here. Pure; hop-by-hop headers and the request id are the relay's own.

What a client says about itself (`X-Forwarded-*`, `X-Corral-*`) is never passed on as if it were our word.
"""

from __future__ import annotations

from corral.contract.http import Headers, Request, Strip

_CLAIMS = (b"forwarded", b"x-real-ip")
_CLAIM_FAMILIES = (b"x-corral-", b"x-forwarded-")

# The controller checks the client's Authorization and cookies itself.
HIDDEN_FROM_CONTROLLER = Strip(_CLAIMS, _CLAIM_FAMILIES)
# A replica sees neither the client's secrets nor its browser: keys, cookies and cross-origin rules end at the edge.
_EDGE = (b"authorization", b"x-api-key", b"cookie", b"origin", b"referer")
HIDDEN_FROM_REPLICA = Strip((*_CLAIMS, *_EDGE), _CLAIM_FAMILIES)


def for_controller(request: Request, gateway_key: bytes) -> Headers:
    """What the gateway vouches for: its key proves that the rest is its word and not the client's."""
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


def for_replica(ingress_token: bytes) -> Headers:
    """A worker's ingress knows the gateway by a token signed by the controller."""
    return ((b"authorization", b"Bearer " + ingress_token),)


def client_ip(host: str) -> str:
    """One spelling per client: a socket for both families shows IPv4 as `::ffff:192.0.2.1`, links add a `%zone`."""
    return host.removeprefix("::ffff:").partition("%")[0]
