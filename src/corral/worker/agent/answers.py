"""What an answer of the controller means for this worker. Pure: a table, tested cell by cell.

Retrying what can never succeed hides the mistake from the person who made it; giving up on what time cures leaves a
machine behind. This is the one place where the two are told apart.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from enum import StrEnum

import msgspec

_LATER = frozenset({408, 425, 429})  # the request was fine, the moment was not
_NO_SUCH_API = frozenset({404, 405, 501})


class Shown(StrEnum):
    """What the worker authenticated a registration with."""

    JOIN_TOKEN = "join token"
    NODE_TOKEN = "node token"
    ENROLMENT = "enrolment"


@dataclass(frozen=True)
class TryLater:
    why: str


@dataclass(frozen=True)
class RegisterAgain:
    """The controller does not know the node, or not by what was shown."""

    why: str


@dataclass(frozen=True)
class Deleted:
    """A person removed this node: it is to be forgotten, and to come back only as somebody new."""

    why: str


@dataclass(frozen=True)
class ShowJoinToken:
    """The node token was refused, and there is a join token that may still open the door."""

    why: str


@dataclass(frozen=True)
class TakeAnotherName:
    """The host name is somebody else's already, and nobody insisted on it."""


@dataclass(frozen=True)
class GiveUp:
    line: str


def read_registration(
    status: int, message: str, *, shown: Shown, has_join_token: bool, name: str, name_was_chosen: bool = True
) -> TryLater | Deleted | ShowJoinToken | TakeAnotherName | GiveUp:
    """An answer to `POST /api/node/register` that is not a 2xx."""
    if (status >= 500 and status not in _NO_SUCH_API) or status in _LATER:
        return TryLater(f"{status}: {message}")
    if status == 410:
        if has_join_token:
            return Deleted(message)
        return GiveUp(f"this node was deleted from the cluster ({message}): to come back, {_JOIN}")
    if status in (401, 403):
        if shown is not Shown.JOIN_TOKEN and has_join_token:
            return ShowJoinToken(message)
        return GiveUp(_refused_by_token(message, shown, name))
    if status == 409:
        return GiveUp(message) if name_was_chosen else TakeAnotherName()  # it names `corral nodes replace`
    if status in _NO_SUCH_API:
        return GiveUp(f"the controller's URL has no node API ({status}): is it a Corral (or LocalAI) controller?")
    if 300 <= status < 400:
        return GiveUp(f"the controller's URL answers with a redirect ({status}) to {message}: give that URL instead")
    return GiveUp(f"the controller refuses this node ({status}): {message}")


def read_call(status: int, message: str) -> TryLater | RegisterAgain | Deleted:
    """An answer to a call of a registered node (heartbeat, credentials) that is not a 2xx."""
    if status == 410:
        return Deleted(message)
    if status in (401, 403, 404):
        return RegisterAgain(f"{status}: {message}")
    return TryLater(f"{status}: {message}")


def error_message(body: bytes, limit: int = 400) -> str:
    """The sentence inside an error answer: ours and LocalAI's, `{"error":{"message":…}}` or `{"error":"…"}`."""
    text = body.decode(errors="replace").strip()
    try:
        error = msgspec.json.decode(body)["error"]
        text = error if isinstance(error, str) else str(error["message"])
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError):
        pass  # a proxy's page, or nothing: show what came
    one_line = " ".join(text.split())
    return (one_line if len(one_line) <= limit else one_line[:limit] + "…") or "no reason given"


_JOIN = "make a new token with `corral token create` and join again with it"


def _refused_by_token(message: str, shown: Shown, name: str) -> str:
    match shown:
        case Shown.JOIN_TOKEN:
            return f"the controller refuses the join token ({message}): {_JOIN}"
        case Shown.NODE_TOKEN:
            return (
                f"the controller no longer accepts this node's credential ({message}): "
                f"run `corral nodes replace {shlex.quote(name)}`, then {_JOIN}"
            )
        case Shown.ENROLMENT:
            return f"the controller does not know this node ({message}): {_JOIN}"
