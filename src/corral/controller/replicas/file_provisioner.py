"""Has the files of models fetched to the controller, in the background, each revision once at a time.

`controller/files` fetches them; the provisioner keeps the status for the next pass of the reconciler.
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
from corral.controller.replicas.load_jobs import TransferProgress
from corral.controller.replicas.memory_estimator import MemoryEstimator
from corral.controller.replicas.plan_input import FileStatus
from corral.controller.replicas.retry import RetryState
from corral.kit.clock import Clock
from corral.kit.errors import CorralError
from corral.kit.log import get_log
from corral.kit.tasks import KeyedTasks

log = get_log(__name__)


class FileSource(Protocol):
    """The part of `controller/files` that replicas need."""

    async def ensure(self, definition: Definition, tell: OnProgress) -> tuple[ReplicaFile, ...]:
        """Fetch and verify all files of the model to the controller."""

    def find(self, digest: str) -> Path | None:
        """The path of a file, where this controller has it."""

    def sources_for(self, node_id: str, files: Sequence[ReplicaFile] = ()) -> tuple[tuple[str, ...], str]:
        """The URLs from which a node fetches these files by digest, best first, and the token for them."""


def _is_unfinished(status: FileStatus | None) -> bool:
    return status is None or (status.files is None and not status.error)


class FileProvisioner(KeyedTasks[tuple[str, str]]):
    """`async with` it. `on_change` is called when a status changed."""

    def __init__(
        self, files: FileSource, memory: MemoryEstimator, clock: Clock, *, on_change: Callable[[], None]
    ) -> None:
        super().__init__()
        self._files = files
        self._memory = memory
        self._on_change = on_change
        self._statuses: dict[tuple[str, str], FileStatus] = {}
        self._retries = RetryState[tuple[str, str]](clock)

    def statuses(self) -> dict[tuple[str, str], FileStatus]:
        """By model and revision."""
        return dict(self._statuses)

    def ensure(self, wanted: dict[tuple[str, str], Definition]) -> None:
        """Fetch the files of these models. Fetches for others are cancelled, and their failures forgotten."""
        for key in self.running():
            if key not in wanted:
                self.cancel(key)
        self._statuses = {key: status for key, status in self._statuses.items() if key in wanted}
        self._retries.forget_all_but(wanted)
        for key, definition in wanted.items():
            if _is_unfinished(self._statuses.get(key)) and self._retries.can_try(key):
                self.start(key, partial(self._fetch, key, definition), name=f"files of {definition.name}")

    async def _fetch(self, key: tuple[str, str], definition: Definition) -> None:
        def on_progress(progress: Progress) -> None:
            transfer = TransferProgress(
                bytes_sent=progress.current_bytes,
                total_bytes=progress.total_bytes,
                file_index=progress.file_index,
                total_files=progress.file_count,
                text=f"{progress.phase} {progress.file}".strip(),
            )
            self._statuses[key] = FileStatus(progress=transfer)

        try:
            files = await self._files.ensure(definition, on_progress)
            await self._memory.read_headers(files)  # before the plan learns of the files: placement depends on them
            self._statuses[key] = FileStatus(files=files)
        except CorralError as error:
            log.warning("files of a model could not be fetched", model=definition.name, error=error.message)
            if self._retries.should_retry(key, error):
                self._statuses[key] = FileStatus(progress=TransferProgress(text=f"will retry soon: {error.message}"))
            else:
                self._statuses[key] = FileStatus(error=f"its files could not be fetched: {error.message}")
        except asyncio.CancelledError:
            self._statuses.pop(key, None)
            raise
        except Exception:
            log.exception("files of a model could not be fetched", model=definition.name)
            self._statuses[key] = FileStatus(error="its files could not be fetched; see the controller's log")
        finally:
            self._on_change()
