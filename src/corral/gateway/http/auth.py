"""Authentication: reads the secret of a request's head and finds the client in the view. Reads the clock only for keys
that expire and for tokens of the playground, which are accepted in `Authorization` alone."""

from __future__ import annotations

import math
from collections.abc import Callable

from corral.contract.http import Headers
from corral.gateway import responses
from corral.gateway.responses import Response
from corral.gateway.view.fleet import Client, Fleet, FleetSource, TokenRefusal

_KEY_PREFIX = b"ck_"
_TOKEN_PREFIX = b"cp_"


def read_secret(headers: Headers) -> bytes | None:
    """The client's secret: `Authorization: Bearer …` as OpenAI's clients send it, else `x-api-key`."""
    api_key = None
    for name, value in headers:
        if name == b"authorization" and value[:7].lower() == b"bearer ":
            return value[7:].strip() or None
        if name == b"x-api-key":
            api_key = value.strip() or None
    return api_key


async def authenticate_fresh(
    fleets: FleetSource, headers: Headers, *, retry_after_s: float
) -> tuple[Fleet, Client] | Response:
    """`authenticate`, after a refresh of the view where the key, or the session of a token, is unknown: it may be a
    moment old. A secret without a prefix of ours is refused at once. Concurrent requests share a refresh, so guessing
    keys causes no more of them than one client does. Returns an error while there is no view yet."""
    fleet = fleets.fleet
    if fleet is None:
        return responses.not_ready(retry_after_s)
    secret = read_secret(headers)
    if secret is not None and _may_be_new(fleet, secret, fleets.server_now):
        await fleets.refresh()
        fleet = fleets.fleet or fleet
    client = authenticate(fleet, headers, fleets.server_now)
    return client if isinstance(client, Response) else (fleet, client)


def authenticate(fleet: Fleet, headers: Headers, now: Callable[[], float]) -> Client | Response:
    """The client, or the error to send."""
    secret = read_secret(headers)
    if secret is None:
        return responses.missing_key()
    client = fleet.find_client(secret)
    if client is None:
        found = _by_token(fleet, headers, now()) if secret.startswith(_TOKEN_PREFIX) else responses.wrong_key()
        if isinstance(found, Response):
            return found
        client = found
    if client.expires_at != math.inf and client.expires_at <= now():
        return responses.expired_key()
    return client


def _by_token(fleet: Fleet, headers: Headers, now: float) -> Client | Response:
    """No program sends such a token as `x-api-key`, and nothing else may stand in for the header that a page has to set
    on purpose."""
    token = read_secret([header for header in headers if header[0] == b"authorization"])
    found = fleet.find_playground_client(token, now) if token is not None else TokenRefusal.INVALID
    match found:
        case Client():
            return found
        case TokenRefusal.EXPIRED:
            return responses.expired_token()
        case TokenRefusal.NO_SESSION | TokenRefusal.INVALID:
            return responses.wrong_token()


def _may_be_new(fleet: Fleet, secret: bytes, now: Callable[[], float]) -> bool:
    """Whether a view that is read now may know the secret, although this one does not."""
    if secret.startswith(_KEY_PREFIX):
        return fleet.find_client(secret) is None
    return secret.startswith(_TOKEN_PREFIX) and fleet.find_playground_client(secret, now()) is TokenRefusal.NO_SESSION
