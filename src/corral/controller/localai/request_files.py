"""Files of a request for a backend on a LocalAI worker: sent there, fetched from there, and removed.

LocalAI's own way (docs/reference/wire/files.md#staging-keys: `ephemeral/…`, `temp`) has no way to remove anything, and
upstream never does. So these files lie in a folder of their own below the models folder, which `model.delete` removes
whole; the backend writes into an empty file put there for it. A folder's name begins with when it was made: what a
controller that died has left behind is swept up by that.
"""

from __future__ import annotations

import asyncio
import contextlib
import posixpath
import secrets
import shutil
import tempfile
from collections.abc import AsyncIterator
from hashlib import file_digest, sha256
from pathlib import Path

from corral.contract.sources import is_safe_path
from corral.controller.localai.calls import PeerCalls
from corral.controller.localai.file_server import FileServerAddress, FileServers
from corral.controller.localai.staging import MODELS
from corral.inference.api_errors import ApiError
from corral.inference.request_files import RequestFolder
from corral.kit.clock import Clock
from corral.kit.errors import CorralError, NotFound
from corral.kit.log import get_log
from corral.kit.tasks import KeyedTasks
from corral.kit.threads import run_uncancelled

log = get_log(__name__)

FOLDER = ".corral-requests"
LARGEST_OUTPUT = 1024 * 1024 * 1024
_MARK = ".folder"
_TRIES = 3
_RETRY_S = 2.0


class RequestFiles:
    """Of one controller. `async with` it: leaving ends what it was about to remove."""

    def __init__(
        self,
        servers: FileServers,
        calls: PeerCalls,
        clock: Clock,
        folder: Path,
        *,
        left_after_s: float = 6 * 3600.0,
    ) -> None:
        """`folder`: on this machine, for what passes through. `left_after_s`: what is older is nobody's any more."""
        self._servers = servers
        self._calls = calls
        self._clock = clock
        self._folder = folder
        self._left_after_s = left_after_s
        self._removing: KeyedTasks[tuple[str, str]] = KeyedTasks()

    async def __aenter__(self) -> RequestFiles:
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)  # an earlier run's
        await self._removing.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._removing.__aexit__(None, None, None)
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    def on(self, node_id: str, where: FileServerAddress) -> RemoteFiles:
        """Those of requests for one node's backends."""
        return RemoteFiles(self, node_id, where)

    def new_name(self) -> str:
        return f"{FOLDER}/{int(self._clock.now().timestamp())}-{secrets.token_hex(8)}"

    def make_here(self) -> Path:
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        return Path(tempfile.mkdtemp(dir=self._folder))

    @property
    def servers(self) -> FileServers:
        return self._servers

    def remove(self, node_id: str, name: str) -> None:
        """In the background: nobody waits for it."""
        self._removing.start((node_id, name), lambda: self._remove(node_id, name), name=f"remove {name}")

    async def sweep(self, node_id: str, where: FileServerAddress) -> None:
        """Remove what controllers left there that are no more. Raises what keeps it from it."""
        listed = await self._servers.list_(where, f"{MODELS}{FOLDER}")
        before = self._clock.now().timestamp() - self._left_after_s
        for name in sorted({file.partition("/")[0] for file in listed}):
            made_at = name.partition("-")[0]
            if made_at.isdigit() and int(made_at) < before:
                log.info("files of a request that nobody removed", node=where.name, folder=name)
                self.remove(node_id, f"{FOLDER}/{name}")

    async def _remove(self, node_id: str, name: str) -> None:
        for tries in range(1, _TRIES + 1):
            try:
                await self._calls.delete_folder(node_id, name)
                return
            except CorralError as error:
                if tries == _TRIES:
                    log.warning(
                        "files of a request were left behind", node_id=node_id, folder=name, error=error.message
                    )
                    return
            except Exception:
                log.exception("files of a request were left behind", node_id=node_id, folder=name)
                return
            await self._clock.sleep(_RETRY_S)


class RemoteFiles:
    """Fits `inference.request_files.Files`."""

    def __init__(self, whole: RequestFiles, node_id: str, where: FileServerAddress) -> None:
        self._whole = whole
        self._node_id = node_id
        self._where = where

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[RequestFolder]:
        here = self._whole.make_here()
        folder = RemoteFolder(here, self._whole.servers, self._where, self._whole.new_name())
        try:
            yield folder
        finally:
            shutil.rmtree(here, ignore_errors=True)  # a few files: quicker than a thread, and never left undone
            if folder.used:
                self._whole.remove(self._node_id, folder.name)


class RemoteFolder:
    def __init__(self, here: Path, servers: FileServers, where: FileServerAddress, name: str) -> None:
        self.here = here
        self.name = name
        self.used = False
        self._servers = servers
        self._where = where

    async def hand_over(self, path: Path) -> str:
        digest, size = await asyncio.to_thread(_measured, path)
        return await self._put(path, digest, size)

    async def output_path(self, name: str) -> str:
        path = self.here / name
        await run_uncancelled(path.touch)
        return await self._put(path, sha256().hexdigest(), 0)

    async def output_folder(self, name: str) -> str:
        """An empty file makes the folder there, and tells its path."""
        mark = self.here / name / _MARK
        mark.parent.mkdir()
        await run_uncancelled(mark.touch)
        return posixpath.dirname(await self._put(mark, sha256().hexdigest(), 0))

    async def list_outputs(self, name: str) -> tuple[str, ...]:
        try:
            listed = await self._servers.list_(self._where, self._key(name))
        except CorralError as error:
            raise _refused(error) from error
        return tuple(file for file in listed if not file.startswith(_MARK) and is_safe_path(file))

    async def fetch(self, name: str) -> Path:
        path = self.here / name
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            await self._servers.get(self._where, self._key(name), path, LARGEST_OUTPUT)
        except NotFound as error:
            raise FileNotFoundError(name) from error
        except CorralError as error:
            raise _refused(error) from error
        return path

    async def _put(self, path: Path, digest: str, size: int) -> str:
        self.used = True
        try:
            return await self._servers.put(
                self._where, self._key(path.relative_to(self.here).as_posix()), path, digest, size
            )
        except CorralError as error:
            raise _refused(error) from error

    def _key(self, name: str) -> str:
        return f"{MODELS}{self.name}/{name}"


def _measured(path: Path) -> tuple[str, int]:
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest(), path.stat().st_size


def _refused(error: CorralError) -> ApiError:
    return ApiError(502, f"The file could not be brought to its node: {error.message}", code="file_not_staged")
