"""Has the files of models fetched to the controller, in the background, each revision once at a time.

How they are fetched is `controller/files`; this remembers what came of it until the next look at the world.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

from corral.blobs.progress import OnProgress, Progress
from corral.contract.messages.replicas import ReplicaFile
from corral.contract.models import Definition
from corral.controller.replicas.facts import Files
from corral.controller.replicas.load_jobs import Moved
from corral.controller.replicas.memory_needs import MemoryNeeds
from corral.controller.replicas.retry import Trying
from corral.kit.clock import Clock
from corral.kit.errors import CorralError
from corral.kit.log import get_log
from corral.kit.tasks import KeyedTasks

log = get_log(__name__)


class FilesOfModels(Protocol):
    """What we need of `controller/files`."""

    async def ensure(self, definition: Definition, tell: OnProgress) -> tuple[ReplicaFile, ...]:
        """All of them on the controller, verified. Raises what keeps them from it."""

    def find(self, digest: str) -> Path | None:
        """One of them, where it is here."""

    def sources_for(self, node_id: str, files: Sequence[ReplicaFile] = ()) -> tuple[tuple[str, ...], str]:
        """Where a node fetches these by digest, best first, and what opens it."""


def _is_open(files: Files | None) -> bool:
    return files is None or (files.files is None and not files.trouble)


class Fetching(KeyedTasks[tuple[str, str]]):
    """`async with` it. `moved` is called when something is new."""

    def __init__(self, files: FilesOfModels, needs: MemoryNeeds, clock: Clock, *, moved: Callable[[], None]) -> None:
        super().__init__()
        self._files = files
        self._needs = needs
        self._moved = moved
        self._known: dict[tuple[str, str], Files] = {}
        self._trying = Trying[tuple[str, str]](clock)

    def known(self) -> dict[tuple[str, str], Files]:
        return dict(self._known)

    def want(self, wanted: dict[tuple[str, str], Definition]) -> None:
        """These are needed, and no others: what is not wanted any more stops, and what failed is forgotten."""
        for key in self.running():
            if key not in wanted:
                self.cancel(key)
        self._known = {key: files for key, files in self._known.items() if key in wanted}
        self._trying.forget_all_but(wanted)
        for key, definition in wanted.items():
            if _is_open(self._known.get(key)) and self._trying.may(key):
                self.start(key, partial(self._fetch, key, definition), name=f"files of {definition.name}")

    async def _fetch(self, key: tuple[str, str], definition: Definition) -> None:
        def tell(progress: Progress) -> None:
            text = f"{progress.phase} {progress.file}".strip()
            moved = Moved(progress.current_bytes, progress.total_bytes, progress.file_index, progress.file_count, text)
            self._known[key] = Files(moved=moved)

        try:
            files = await self._files.ensure(definition, tell)
            await self._needs.learn(files)  # before anybody is told that they are there: its place depends on it
            self._known[key] = Files(files=files)
        except CorralError as error:
            log.warning("files of a model could not be fetched", model=definition.name, error=error.message)
            if self._trying.again(key, error):
                self._known[key] = Files(moved=Moved(text=f"tried again soon: {error.message}"))
            else:
                self._known[key] = Files(trouble=f"its files could not be fetched: {error.message}")
        except asyncio.CancelledError:
            self._known.pop(key, None)
            raise
        except Exception:
            log.exception("files of a model could not be fetched", model=definition.name)
            self._known[key] = Files(trouble="its files could not be fetched; the controller's log says why")
        finally:
            self._moved()
