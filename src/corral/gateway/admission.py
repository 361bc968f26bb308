"""Who asks: a secret in the head, a client in the view. Pure; the clock is only read for keys that expire."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

from corral.contract.http import Headers
from corral.gateway import answers
from corral.gateway.answers import Answer
from corral.gateway.view import Client, Fleet


class FleetSource(Protocol):
    @property
    def fleet(self) -> Fleet | None:
        """The newest view; None before the first."""

    def server_now(self) -> float:
        """Seconds since the epoch on the controller's clock."""


def secret_of(headers: Headers) -> bytes | None:
    """The secret a client shows: `Authorization: Bearer …` as OpenAI's clients do, else `x-api-key` as others do."""
    other = None
    for name, value in headers:
        if name == b"authorization" and value[:7].lower() == b"bearer ":
            return value[7:].strip() or None
        if name == b"x-api-key":
            other = value.strip() or None
    return other


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
