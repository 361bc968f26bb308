"""Who may say and hear what on the bus: the exact lists, one function per kind of user. Pure.

A list that allows nothing must be written as a denial: an empty allow list means "everything" to the server.

Nobody who answers by the right to respond may hear what it says itself. The server grants that right for the reply
subject of every message it delivers, and whoever publishes chooses that subject: a node that heard its own heartbeat
could send one whose "reply" is another node's order, and would then be allowed to give it.
"""

from __future__ import annotations

from dataclasses import dataclass

from corral.bus.matching import covers
from corral.contract.subjects import sanitise

INBOX = "_INBOX"
EVERYTHING = ">"


@dataclass(frozen=True)
class Permissions:
    publish: tuple[str, ...]
    subscribe: tuple[str, ...]
    reply_ttl_s: float = 0.0  # how long one answer to each received request may take; 0 = may not answer
    unheard: tuple[str, ...] = ()  # left out of what `subscribe` allows, also where a pattern covers it

    def may_publish(self, subject: str) -> bool:
        return any(covers(allowed, subject) for allowed in self.publish)

    def may_subscribe(self, pattern: str) -> bool:
        """Like the server: a pattern that covers what is unheard is allowed, and simply does not bring it."""
        return any(covers(allowed, pattern) for allowed in self.subscribe) and self.may_hear(pattern)

    def may_hear(self, subject: str) -> bool:
        return not any(covers(denied, subject) for denied in self.unheard)


def inbox_prefix(name: str) -> str:
    """A user's own inbox. The name is part of the first token, so that `_INBOX.>` covers nobody's."""
    return f"{INBOX}_{sanitise(name)}"


def gateway_inbox(name: str) -> str:
    """Gateways are named by people, so their names are kept apart from node ids and from our own."""
    return inbox_prefix(f"gateway-{name}")


def node_permissions(node: str, *, reply_ttl_s: float) -> Permissions:
    own = f"nodes.{sanitise(node)}"
    says = (
        f"{own}.heartbeat",
        f"{own}.load",
        f"{own}.backend.*.*.progress",
        f"{own}.backend.*.*.result",
        f"{own}.replica.*.*.progress",
        f"{own}.replica.*.*.result",
    )
    return Permissions(
        publish=says, subscribe=(f"{own}.>", f"{inbox_prefix(node)}.>"), reply_ttl_s=reply_ttl_s, unheard=says
    )


def localai_node_permissions(node: str, *, reply_ttl_s: float) -> Permissions:
    """The contract's list for a LocalAI worker, less `_INBOX.>` both ways: it answers by the right to respond and
    asks nothing itself, so it gets no inbox and can neither read nor forge another node's replies. Less `files.>` to
    publish, too: it is asked there and must hear it, and says nothing there but answers."""
    own = f"nodes.{sanitise(node)}"
    says = (f"{own}.backend.install.*.progress",)
    return Permissions(publish=says, subscribe=(f"{own}.>",), reply_ttl_s=reply_ttl_s, unheard=says)


def gateway_permissions(name: str) -> Permissions:
    """A gateway only listens: what it has to say goes to the controller by HTTP."""
    return Permissions(
        publish=(),
        subscribe=("corral.view.>", "nodes.*.load", f"{gateway_inbox(name)}.>"),
    )


def service_permissions(name: str, *, reply_ttl_s: float) -> Permissions:
    """Controllers: everything of the domain, nothing of the server's own (`$SYS` belongs to the system account)."""
    return Permissions(
        publish=("nodes.>", "corral.>"),
        subscribe=("nodes.>", "corral.>", f"{inbox_prefix(name)}.>"),
        reply_ttl_s=reply_ttl_s,
    )


def system_permissions(name: str) -> Permissions:
    """The one user of the system account: may replace and look up accounts, nothing else."""
    return Permissions(
        publish=("$SYS.REQ.CLAIMS.UPDATE", "$SYS.REQ.ACCOUNT.*.CLAIMS.LOOKUP"),
        subscribe=(f"{inbox_prefix(name)}.>",),
    )
