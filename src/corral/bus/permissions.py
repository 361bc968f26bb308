"""The publish and subscribe permissions of each kind of bus user, and subject patterns. Pure.

A list that allows nothing must be written as a denial: an empty allow list means "everything" to the server.

A user that replies by `allow_responses` must not receive its own messages. The server grants that permission for the
reply subject of every message it delivers, and the publisher chooses that subject: a node that received its own
heartbeat could send one whose reply subject is another node's order, and would then be allowed to publish that order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile

from corral.contract.subjects import sanitise

INBOX = "_INBOX"
EVERYTHING = ">"


@dataclass(frozen=True)
class Permissions:
    publish: tuple[str, ...]
    subscribe: tuple[str, ...]
    reply_ttl_s: float = 0.0  # the longest time between a request and its one reply; 0 = may not reply
    denied_subscriptions: tuple[str, ...] = ()  # exceptions to `subscribe`, also where a pattern covers them

    def may_publish(self, subject: str) -> bool:
        return any(covers(allowed, subject) for allowed in self.publish)

    def may_subscribe(self, pattern: str) -> bool:
        """Like the server: a pattern that covers a denied subject is allowed, and does not deliver that subject."""
        return any(covers(allowed, pattern) for allowed in self.subscribe) and self.may_receive(pattern)

    def may_receive(self, subject: str) -> bool:
        return not any(covers(denied, subject) for denied in self.denied_subscriptions)


def inbox_prefix(name: str) -> str:
    """A user's own inbox. The name is part of the first token, so that `_INBOX.>` covers nobody's."""
    return f"{INBOX}_{sanitise(name)}"


def gateway_inbox(name: str) -> str:
    """Gateways are named by people, so their names are kept apart from node ids and from our own."""
    return inbox_prefix(f"gateway-{name}")


def node_permissions(node: str, *, reply_ttl_s: float) -> Permissions:
    own = f"nodes.{sanitise(node)}"
    published = (
        f"{own}.heartbeat",
        f"{own}.load",
        f"{own}.backend.*.*.progress",
        f"{own}.backend.*.*.result",
        f"{own}.replica.*.*.progress",
        f"{own}.replica.*.*.result",
        f"{own}.model.*.*.progress",
        f"{own}.model.*.*.result",
    )
    return Permissions(
        publish=published,
        subscribe=(f"{own}.>", f"{inbox_prefix(node)}.>"),
        reply_ttl_s=reply_ttl_s,
        denied_subscriptions=published,
    )


def localai_node_permissions(node: str, *, reply_ttl_s: float) -> Permissions:
    """The contract's list for a LocalAI worker, less `_INBOX.>` both ways: it answers by the right to respond and
    asks nothing itself, so it gets no inbox and can neither read nor forge another node's replies. Less `files.>` to
    publish, too: it is asked there and must hear it, and says nothing there but answers."""
    own = f"nodes.{sanitise(node)}"
    published = (f"{own}.backend.install.*.progress",)
    return Permissions(
        publish=published, subscribe=(f"{own}.>",), reply_ttl_s=reply_ttl_s, denied_subscriptions=published
    )


def gateway_permissions(name: str) -> Permissions:
    """A gateway only subscribes: it reports to the controller by HTTP."""
    return Permissions(
        publish=(),
        subscribe=("corral.view.>", "nodes.*.load", f"{gateway_inbox(name)}.>"),
    )


def service_permissions(name: str, *, reply_ttl_s: float) -> Permissions:
    """Controllers: all subjects of Corral, none of the server (`$SYS` belongs to the system account)."""
    return Permissions(
        publish=("nodes.>", "corral.>"),
        subscribe=("nodes.>", "corral.>", f"{inbox_prefix(name)}.>"),
        reply_ttl_s=reply_ttl_s,
    )


def system_permissions(name: str) -> Permissions:
    """The one user of the system account: may update and look up accounts, nothing else."""
    return Permissions(
        publish=("$SYS.REQ.CLAIMS.UPDATE", "$SYS.REQ.ACCOUNT.*.CLAIMS.LOOKUP"),
        subscribe=(f"{inbox_prefix(name)}.>",),
    )


# Subject patterns: `*` stands for one token, a final `>` for one or more.


@lru_cache(maxsize=4096)  # the bus within one process asks for the same few again and again
def matches(pattern: str, subject: str) -> bool:
    """Does a subscription to `pattern` receive a message on `subject`?"""
    start, tokens = _split(pattern)
    if not tokens:
        return pattern == subject
    return subject.startswith(start) and _covers(tokens, subject.split("."))


@lru_cache(maxsize=1024)
def _split(pattern: str) -> tuple[str, tuple[str, ...]]:
    """What its subjects begin with, and its tokens; none of a pattern that is one subject."""
    tokens = tuple(pattern.split("."))
    literal = tuple(takewhile(lambda token: token not in ("*", ">"), tokens))
    return (".".join(literal), tokens) if literal != tokens else (pattern, ())


def covers(wide: str, narrow: str) -> bool:
    """Does `wide` allow everything that `narrow`, itself perhaps a pattern, could ever match?"""
    return _covers(wide.split("."), narrow.split("."))


def _covers(wide: Sequence[str], narrow: Sequence[str]) -> bool:
    for place, token in enumerate(wide):
        if token == ">":
            return len(narrow) > place
        if place >= len(narrow) or narrow[place] == ">":
            return False
        if token != "*" and token != narrow[place]:
            return False
    return len(wide) == len(narrow)
