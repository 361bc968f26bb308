"""Which nodes' tokens count: those of approved nodes, made under the credential that the node holds now.

A token lives for an hour, a node may be deleted or replaced at any time. Listeners ask here at every request, so this
is a snapshot in memory, read again whenever the nodes' counter moves on any controller. While the database is away the
last snapshot counts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from corral.kit.clock import Clock
from corral.kit.errors import CorralError
from corral.kit.log import get_log
from corral.kit.tasks import Wake, run_every
from corral.store.engine.transactions import Store
from corral.store.tables import nodes

log = get_log(__name__)

_CREDENTIAL_CHARS = 16
_SHARED = "shared"  # with the fleet's other nodes, by those that have no token of their own
_ASK_S = 2.0


def credential_of(token_hash: str) -> str:
    """Names a node's credential in tokens without telling it."""
    return token_hash[:_CREDENTIAL_CHARS] or _SHARED


class ActiveNodes:
    name = "active nodes"

    def __init__(self, store: Store, clock: Clock, *, every_s: float = 15.0) -> None:
        """`every_s`: how often to read when no change is notified."""
        self._store = store
        self._clock = clock
        self._every_s = every_s
        self._credentials: Mapping[str, str] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self.wake = Wake()

    async def run(self) -> None:
        await run_every(self.name, self._every_s, self.refresh, clock=self._clock, wake=self.wake, max_wait_s=2.0)

    async def refresh(self) -> None:
        self._loop = asyncio.get_running_loop()
        async with self._store.read() as tx:
            found = await nodes.list_credentials(tx)
        self._credentials = {node_id: credential_of(token_hash) for node_id, token_hash in found.items()}

    def credential(self, node_id: str) -> str:
        """Of that node now; empty when it is not among those that count."""
        return self._credentials.get(node_id, "")

    def is_current(self, node_id: str, credential: str) -> bool:
        """By the last snapshot. Any thread may ask."""
        return bool(credential) and self._credentials.get(node_id) == credential

    def ask(self, node_id: str, credential: str) -> bool:
        """Like `is_current`, but a node that the snapshot does not know is looked for in the database: it may have
        joined by another controller a moment ago. For threads; raises TimeoutError when the database is away."""
        if self.is_current(node_id, credential):
            return True
        if self._loop is None:
            return False
        reading = asyncio.run_coroutine_threadsafe(self.refresh(), self._loop)
        try:
            reading.result(_ASK_S)
        except (CorralError, TimeoutError) as error:
            reading.cancel()
            raise TimeoutError("the nodes cannot be read now") from error
        return self.is_current(node_id, credential)
