"""Verifies an installed backend on demand: the node compares every file with the unpacked archive."""

from __future__ import annotations

from corral.contract.admin import BackendVerified
from corral.controller.orders.backend_calls import BackendCalls
from corral.kit.errors import Conflict, Failed, NotFound
from corral.kit.humanize import did_you_mean
from corral.store.engine.transactions import Store
from corral.store.tables import node_backends, nodes


class BackendVerifier:
    def __init__(self, store: Store, calls: BackendCalls) -> None:
        self._store = store
        self._calls = calls

    async def verify(self, id_or_name: str, backend: str) -> BackendVerified:
        """Raises NotFound, Conflict for a node that cannot verify now, and the errors of a call."""
        async with self._store.read() as tx:
            node = await nodes.find(tx, id_or_name) or await nodes.find_by_name(tx, id_or_name)
            if node is None:
                names = [outline.name for outline in await nodes.list_outlines(tx)]
                raise NotFound(f"there is no node {id_or_name!r}{did_you_mean(id_or_name, names)}")
            inventory = await node_backends.find(tx, node.id)
        there = {name for row in (inventory.backends if inventory else ()) for name in (row.name, row.alias) if name}
        if backend not in there:
            raise NotFound(f"{backend!r} is not installed on {node.name}{did_you_mean(backend, there)}")
        if not node.protocol:
            raise Conflict(
                f"{node.name} runs a LocalAI worker, which cannot verify a backend; install it with force instead"
            )
        if node.status != "healthy":
            raise Conflict(f"{node.name} is {node.status}; try again when it is healthy")
        reply = await self._calls.verify(node.id, backend)
        if not reply.success:
            raise Failed(f"{node.name}: {reply.error}")
        return BackendVerified(
            node=node.name,
            backend=backend,
            whole=reply.damaged == 0,
            version=reply.version,
            digest=reply.digest,
            missing=reply.missing,
            changed=reply.changed,
            damaged=reply.damaged,
        )
