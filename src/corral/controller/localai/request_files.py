"""Files of a request for a backend on a LocalAI worker: sent there, fetched from there, and removed.

LocalAI's own way (docs/reference/wire/files.md#staging-keys: `ephemeral/…`, `temp`) has no way to remove anything, and
upstream never does. So these files lie in a folder of their own below the models folder, which `model.delete` removes
whole; the backend writes into an empty file put there for it. A folder's name begins with when it was made: what a
controller that died has left behind is swept up by that.

With an object storage the files are objects below `ephemeral/`, and the worker keeps its copies in its cache: a Corral
worker removes them after a while, LocalAI's never does.
"""

from __future__ import annotations

import asyncio
import contextlib
import posixpath
import secrets
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Protocol

from corral.contract.sources import is_safe_path
from corral.controller.localai.calls import PeerCalls
from corral.controller.localai.file_server import MODELS, FileServerAddress, FileServers
from corral.controller.localai.object_files import ObjectFiles
from corral.inference.api_errors import ApiError
from corral.inference.request_files import RequestFolder
from corral.kit.clock import Clock
from corral.kit.errors import CorralError, NotFound
from corral.kit.log import get_log
from corral.kit.tasks import KeyedTasks
from corral.kit.threads import run_uncancelled

log = get_log(__name__)

FOLDER = ".corral-requests"
EPHEMERAL = "ephemeral/"
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
        objects: ObjectFiles | None = None,
        left_after_s: float = 6 * 3600.0,
    ) -> None:
        """`folder`: on this machine, for what passes through. `objects`: where an object storage is configured.
        `left_after_s`: what is older is nobody's any more."""
        self._servers = servers
        self._calls = calls
        self._clock = clock
        self._folder = folder
        self._objects = objects
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

    def carriers(self, node_id: str, where: FileServerAddress, name: str) -> list[Carrier]:
        """The ways to the node, best first."""
        found: list[Carrier] = []
        if self._objects is not None:
            found.append(ObjectCarrier(self._objects, node_id, f"{EPHEMERAL}requests/{name.rpartition('/')[2]}"))
        if where.url or not found:
            found.append(HttpCarrier(self._servers, where, f"{MODELS}{name}", lambda: self.remove(node_id, name)))
        return found

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


class Carrier(Protocol):
    """Moves the files of one request to its node and back. Names are relative to the folder of the request."""

    async def put(self, name: str, path: Path, sha256: str, size: int) -> str:
        """The path of the file on the node."""

    async def list_(self, name: str) -> tuple[str, ...]: ...

    async def get(self, name: str, path: Path) -> None:
        """Raises NotFound, and Failed for a file that is too large."""

    def clean_up(self) -> None:
        """Remove what was moved, in the background."""


class HttpCarrier:
    def __init__(self, servers: FileServers, where: FileServerAddress, folder: str, remove: Callable[[], None]) -> None:
        self._servers = servers
        self._where = where
        self._folder = folder
        self._remove = remove

    async def put(self, name: str, path: Path, sha256: str, size: int) -> str:
        return await self._servers.put(self._where, f"{self._folder}/{name}", path, sha256, size)

    async def list_(self, name: str) -> tuple[str, ...]:
        return await self._servers.list_(self._where, f"{self._folder}/{name}")

    async def get(self, name: str, path: Path) -> None:
        await self._servers.get(self._where, f"{self._folder}/{name}", path, LARGEST_OUTPUT)

    def clean_up(self) -> None:
        self._remove()


class ObjectCarrier:
    """The worker's cache has a file under the key of its object. `files.temp` would give a name without the extension
    by which backends choose a format."""

    def __init__(self, objects: ObjectFiles, node_id: str, folder: str) -> None:
        self._objects = objects
        self._node_id = node_id
        self._folder = folder
        self._there: dict[str, str] = {}  # by name: the path on the node

    async def put(self, name: str, path: Path, sha256: str, size: int) -> str:
        key = f"{self._folder}/{name}"
        self._there.setdefault(name, "")
        self._there[name] = await self._objects.ensure(self._node_id, key, path, sha256, lambda _have: None)
        return self._there[name]

    async def list_(self, name: str) -> tuple[str, ...]:
        return await self._objects.list_(self._node_id, f"{self._folder}/{name}")

    async def get(self, name: str, path: Path) -> None:
        folder, _, rest = name.partition("/")
        there = self._there.get(name) or f"{posixpath.dirname(self._there[f'{folder}/{_MARK}'])}/{rest}"
        key = f"{self._folder}/fetch/{name}"
        await self._objects.fetch(self._node_id, there, key, path, max_bytes=LARGEST_OUTPUT)

    def clean_up(self) -> None:
        self._objects.delete_soon([f"{self._folder}/{name}" for name in self._there])


class RemoteFiles:
    """Fits `inference.request_files.Files`."""

    def __init__(self, whole: RequestFiles, node_id: str, where: FileServerAddress) -> None:
        self._whole = whole
        self._node_id = node_id
        self._where = where

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[RequestFolder]:
        here = self._whole.make_here()
        folder = RemoteFolder(here, self._whole.carriers(self._node_id, self._where, self._whole.new_name()))
        try:
            yield folder
        finally:
            shutil.rmtree(here, ignore_errors=True)  # a few files: quicker than a thread, and never left undone
            folder.clean_up()


class RemoteFolder:
    def __init__(self, here: Path, carriers: list[Carrier]) -> None:
        """`carriers`: the ways to the node, best first. The first file decides which one the request takes."""
        self.here = here
        self._carriers = carriers
        self._used: list[Carrier] = []
        self._decided = False

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
            listed = await self._carriers[0].list_(name)
        except CorralError as error:
            raise _refused(error) from error
        return tuple(file for file in listed if not file.startswith(_MARK) and is_safe_path(file))

    async def fetch(self, name: str) -> Path:
        path = self.here / name
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            await self._carriers[0].get(name, path)
        except NotFound as error:
            raise FileNotFoundError(name) from error
        except CorralError as error:
            raise _refused(error) from error
        return path

    def clean_up(self) -> None:
        for carrier in self._used:
            carrier.clean_up()

    async def _put(self, path: Path, digest: str, size: int) -> str:
        name = path.relative_to(self.here).as_posix()
        while True:
            carrier = self._carriers[0]
            if carrier not in self._used:
                self._used.append(carrier)
            try:
                there = await carrier.put(name, path, digest, size)
            except CorralError as error:
                if self._decided or len(self._carriers) == 1:
                    raise _refused(error) from error
                log.warning("the files of a request take another way", reason=error.message)
                del self._carriers[0]
            else:
                self._decided = True
                return there


def _measured(path: Path) -> tuple[str, int]:
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest(), path.stat().st_size


def _refused(error: CorralError) -> ApiError:
    return ApiError(502, f"The file could not be brought to its node: {error.message}", code="file_not_staged")
