"""One bridge of `inference/` for each process on a LocalAI worker that is asked for through this controller."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from corral.controller.localai.file_server import FileServerAddress
from corral.controller.localai.request_files import RequestFiles
from corral.inference.backend_process import BackendProcess
from corral.inference.bridge import Bridge
from corral.store.engine.transactions import Store
from corral.store.tables import nodes
from corral.store.tables.peer_processes import PeerProcess


class Bridges:
    def __init__(
        self,
        store: Store,
        files: RequestFiles,
        token: str,
        known: Callable[[], Mapping[str, PeerProcess]],
    ) -> None:
        """`known`: the processes there are. `token`: what they ask for."""
        self._store = store
        self._files = files
        self._token = token
        self._known = known
        self._open: dict[str, tuple[PeerProcess, Bridge]] = {}

    async def of(self, process: PeerProcess) -> Bridge:
        if (found := self._find(process)) is not None:
            return found
        async with self._store.read() as tx:
            node = await nodes.get(tx, process.node_id)
        if (found := self._find(process)) is not None:  # somebody else asked for it meanwhile
            return found
        where = FileServerAddress(node.name, node.ingress_url)
        bridge = Bridge(
            BackendProcess(
                address=process.address,
                model=process.model,
                backend=process.backend,
                token=self._token,
                definition=process.definition,
                load=process.load,
                slots=process.slots,
            ),
            self._files.on(process.node_id, where),
        )
        before = self._open.pop(process.process_id, None)
        self._open[process.process_id] = (process, bridge)
        if before is not None:
            await before[1].close()
        return bridge

    def _find(self, process: PeerProcess) -> Bridge | None:
        found = self._open.get(process.process_id)
        return found[1] if found is not None and found[0] == process else None

    async def tidy(self) -> None:
        """Close those of processes that are no more."""
        known = self._known()
        gone = [process_id for process_id in self._open if process_id not in known]
        for process_id in gone:
            await self._open.pop(process_id)[1].close()

    async def close(self) -> None:
        opened, self._open = self._open, {}
        for _, bridge in opened.values():
            await bridge.close()
