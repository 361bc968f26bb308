"""Who asks: a secret in the head, a client in the view. The clock is only read for keys that expire."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

from corral.contract.http import Headers
from corral.gateway import answers
from corral.gateway.answers import Answer
from corral.gateway.view import Client, Fleet

_KEY = b"ck_"


class FleetSource(Protocol):
    @property
    def fleet(self) -> Fleet | None:
        """The newest view; None before the first."""

    def server_now(self) -> float:
        """Seconds since the epoch on the controller's clock."""

    async def look_again(self) -> None:
        """Wait for a view that is read from now on, not for long."""


def secret_of(headers: Headers) -> bytes | None:
    """The secret a client shows: `Authorization: Bearer …` as OpenAI's clients do, else `x-api-key` as others do."""
    other = None
    for name, value in headers:
        if name == b"authorization" and value[:7].lower() == b"bearer ":
            return value[7:].strip() or None
        if name == b"x-api-key":
            other = value.strip() or None
    return other


async def admit_lately(fleets: FleetSource, fleet: Fleet, headers: Headers) -> tuple[Fleet, Client | Answer]:
    """`admit` for one that may wait: a key that nobody knows may have been made a moment ago. What does not even look
    like one of ours is refused at once; the looks that others cause are shared, so a guesser causes no more of them
    than one client does."""
    secret = secret_of(headers)
    if secret is not None and secret.startswith(_KEY) and fleet.find_client(secret) is None:
        await fleets.look_again()
        fleet = fleets.fleet or fleet
    return fleet, admit(fleet, headers, fleets.server_now)


def admit(fleet: Fleet, headers: Headers, now: Callable[[], float]) -> Client | Answer:
    """The client, or the refusal to send."""
    secret = secret_of(headers)
    if secret is None:
        return answers.missing_key()
    client = fleet.find_client(secret)
    if client is None:
        return answers.wrong_key()
    if client.expires_at != math.inf and client.expires_at <= now():
        return answers.expired_key()
    return client
