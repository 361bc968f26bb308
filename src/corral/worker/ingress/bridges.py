"""One bridge of `inference/` for each gRPC process that is asked for. Importing gRPC costs as much memory as a quarter
of the worker, so only a worker with such a process does it, and only when it is first asked.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from corral.inference.request_files import LocalFiles, RequestFiles
from corral.worker.supervisor.table import Running
from corral.worker.system.users import find_user

if TYPE_CHECKING:
    from corral.inference.bridge import Bridge


def open_request_files(folder: Path, backend_user: str) -> LocalFiles:
    """What an earlier worker left there is removed. Raises Invalid for a user nobody knows."""
    user, _ = find_user(backend_user)
    files = LocalFiles(folder, (user.uid, user.gid) if user is not None else None)
    files.sweep()
    return files


class Bridges:
    def __init__(self, files: RequestFiles) -> None:
        self._files = files
        self._known: dict[str, tuple[Running, Bridge]] = {}

    async def of(self, running: Running, find: Callable[[str], Running | None]) -> Bridge:
        """`find` tells which of the others still serve; those that do not are forgotten."""
        known = self._known.get(running.process_id)
        if known is not None and known[0] == running:
            return known[1]
        bridge = self._open(running)
        gone = [each for each in self._known if each == running.process_id or find(each) is None]
        old = [self._known.pop(process_id)[1] for process_id in gone]
        self._known[running.process_id] = running, bridge
        for each in old:
            await each.close()
        return bridge

    async def close(self) -> None:
        known, self._known = self._known, {}
        for _, bridge in known.values():
            await bridge.close()

    def _open(self, running: Running) -> Bridge:
        from corral.inference.backend_process import BackendProcess
        from corral.inference.bridge import Bridge  # see above: memory

        return Bridge(
            BackendProcess(
                address=running.address,
                model=running.model,
                backend=running.backend,
                token=running.token,
                definition=running.definition,
                load=running.load,
                slots=running.slots,
            ),
            self._files,
        )
