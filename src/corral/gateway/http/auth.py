"""Authentication: reads the secret of a request's head and finds the client in the view. Reads the clock only for keys
that expire."""

from __future__ import annotations

import math
from collections.abc import Callable

from corral.contract.http import Headers
from corral.gateway import responses
from corral.gateway.responses import Response
from corral.gateway.view.fleet import Client, Fleet, FleetSource

_KEY_PREFIX = b"ck_"


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
    """`authenticate`, after a refresh of the view where the key is unknown: it may have been created a moment ago. A
    secret without the prefix of our keys is refused at once. Concurrent requests share a refresh, so guessing keys
    causes no more of them than one client does. Returns an error while there is no view yet."""
    fleet = fleets.fleet
    if fleet is None:
        return responses.not_ready(retry_after_s)
    secret = read_secret(headers)
    if secret is not None and secret.startswith(_KEY_PREFIX) and fleet.find_client(secret) is None:
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
        return responses.wrong_key()
    if client.expires_at != math.inf and client.expires_at <= now():
        return responses.expired_key()
    return client
