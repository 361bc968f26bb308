"""Changes the status of a node: reads it, asks `transitions`, and writes unless the row has changed meanwhile."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from corral.contract.messages.nodes import NodeStatus
from corral.controller.registry.transitions import Moved, NodeEvent, NodeState, Stays, TransitionRefused, next_state
from corral.controller.runtime.change_feed import ChangeFeed
from corral.kit.errors import Conflict, CorralError, NotFound
from corral.kit.log import get_log
from corral.store.engine.transactions import Store, Transaction
from corral.store.tables import node_events, nodes, revisions
from corral.store.tables.node_events import StatusChange
from corral.store.tables.nodes import Node

log = get_log(__name__)

_TRIES = 5

# Asked inside the transaction, with the row locked: whether the event still is what should happen.
Check = Callable[[Transaction, Node], Awaitable[bool]]


class NodeChanges:
    def __init__(self, store: Store, feed: ChangeFeed) -> None:
        self._store = store
        self._feed = feed
        self._callbacks: list[Callable[[], None]] = []

    def on_change(self, callback: Callable[[], None]) -> None:
        """Be woken when a node registered or changed its status."""
        self._callbacks.append(callback)

    async def apply(self, node_id: str, event: NodeEvent, *, check: Check | None = None) -> Node:
        """Raises `Conflict` when the event is refused; returns the node as it is now."""
        for _ in range(_TRIES):
            try:
                async with self._store.write() as tx:
                    before = await nodes.find(tx, node_id)
                    if before is None:
                        raise NotFound(f"there is no node {node_id}")
                    if check is not None and not await check(tx, before):
                        return before
                    after = await self.apply_in(tx, before, event)
                    if after is not before:
                        await revisions.bump(tx, "nodes")
            except Overtaken:
                continue
            if after is not before:
                log.info(
                    "node status", node=after.name, status=after.status, was=before.status, reason=after.status_reason
                )
                self.notify(node_id)
            return after
        raise Conflict("the node changes too fast; try again")

    async def mark_unreachable(self, node_id: str) -> None:
        """No worker listens on the node: it is unhealthy until its next heartbeat. Logs errors instead of raising them,
        because the caller goes on with the order that found this out."""
        try:
            await self.apply(node_id, NodeEvent.DID_NOT_ANSWER)
        except (Conflict, NotFound):
            return  # the node changed or left in the meantime
        except CorralError as error:
            log.warning("node could not be marked as unreachable", node_id=node_id, error=error.message)

    async def apply_in(
        self, tx: Transaction, node: Node, event: NodeEvent, columns: Mapping[str, Any] | None = None
    ) -> Node:
        """Inside a transaction that also writes `columns`."""
        written = dict(columns or {})
        outcome = next_state(state_of(node), event)
        match outcome:
            case TransitionRefused(why):
                raise Conflict(f"{node.name}: {why}")
            case Moved(state, reason):
                written |= {
                    "status": state.status,
                    "approved": state.approved,
                    "drained": state.drained,
                    "left": state.left,
                    "status_reason": reason,
                }
                if state.status != node.status:
                    written["status_changed_at"] = at = await tx.now()
                    await node_events.add(tx, StatusChange(node.id, at, state.status, reason))
            case Stays():
                pass
        return await self.write(tx, node, written) if written else node

    async def write(self, tx: Transaction, node: Node, columns: Mapping[str, Any]) -> Node:
        """The node with these columns, unless it changed since it was read."""
        if not await nodes.update(tx, node.id, columns, expected=node.row_version):
            raise Overtaken(f"{node.name} changed meanwhile; try again")
        return await nodes.get(tx, node.id)

    def notify(self, node_id: str) -> None:
        self._feed.notify("nodes", node_id)
        for callback in self._callbacks:
            callback()


class Overtaken(Conflict):
    """Somebody else changed the node between our read and our write: ordinary, decide again."""


def state_of(node: Node) -> NodeState:
    return NodeState(NodeStatus(node.status), node.approved, node.drained, node.left)
