"""What an error response of the controller means for this worker. Pure.

A retry that can never succeed hides a mistake from the person who made it; a worker that ends because of a passing
error leaves its machine out of the cluster. Only this module tells the two apart.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from enum import StrEnum

_RETRYABLE = frozenset({408, 425, 429})
_NO_SUCH_API = frozenset({404, 405, 501})


class Credential(StrEnum):
    """What the worker authenticated a registration with."""

    JOIN_TOKEN = "join token"
    NODE_TOKEN = "node token"
    ENROLMENT = "enrolment"


@dataclass(frozen=True)
class TryLater:
    why: str


@dataclass(frozen=True)
class RegisterAgain:
    """The controller does not know the node, or rejects its credential."""

    why: str


@dataclass(frozen=True)
class Deleted:
    """A person deleted this node: the worker may come back only as a new node."""

    why: str


@dataclass(frozen=True)
class UseJoinToken:
    """The controller refused the node token, and the worker has a join token to try."""

    why: str


@dataclass(frozen=True)
class ChooseAnotherName:
    """Another node has the host name, and no person chose that name."""


@dataclass(frozen=True)
class GiveUp:
    line: str


def read_registration(
    status: int, message: str, *, credential: Credential, has_join_token: bool, name: str, name_was_chosen: bool = True
) -> TryLater | Deleted | UseJoinToken | ChooseAnotherName | GiveUp:
    """An error response to `POST /api/node/register`."""
    if (status >= 500 and status not in _NO_SUCH_API) or status in _RETRYABLE:
        return TryLater(f"{status}: {message}")
    if status == 410:
        if has_join_token:
            return Deleted(message)
        return GiveUp(f"this node was deleted from the cluster ({message}): to come back, {_JOIN}")
    if status in (401, 403):
        if credential is not Credential.JOIN_TOKEN and has_join_token:
            return UseJoinToken(message)
        return GiveUp(_refused_by_token(message, credential, name))
    if status == 409:
        return GiveUp(message) if name_was_chosen else ChooseAnotherName()  # it names `corral nodes replace`
    if status in _NO_SUCH_API:
        return GiveUp(f"the controller's URL has no node API ({status}): is it a Corral (or LocalAI) controller?")
    if 300 <= status < 400:
        return GiveUp(f"the controller's URL redirects ({status}) to {message}: give that URL instead")
    return GiveUp(f"the controller refuses this node ({status}): {message}")


def read_call(status: int, message: str) -> TryLater | RegisterAgain | Deleted:
    """An error response to a call of a registered node (heartbeat, credentials)."""
    if status == 410:
        return Deleted(message)
    if status in (401, 403, 404):
        return RegisterAgain(f"{status}: {message}")
    return TryLater(f"{status}: {message}")


_JOIN = "make a new token with `corral token create` and join again with it"


def _refused_by_token(message: str, credential: Credential, name: str) -> str:
    match credential:
        case Credential.JOIN_TOKEN:
            return f"the controller refuses the join token ({message}): {_JOIN}"
        case Credential.NODE_TOKEN:
            return (
                f"the controller no longer accepts this node's credential ({message}): "
                f"run `corral nodes replace {shlex.quote(name)}`, then {_JOIN}"
            )
        case Credential.ENROLMENT:
            return f"the controller does not know this node ({message}): {_JOIN}"
