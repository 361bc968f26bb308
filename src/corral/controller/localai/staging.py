"""A model's files on a LocalAI worker, and what LoadModel is then told of them
(docs/reference/wire/files.md#staging-a-model).

Files go under the keys `models/<model>/<which set of files>/<path>`: the worker's own models folder, where deleting the
model removes them. Names of the definition are then looked up among what is really there, so that a hub's name is never
mistaken for a file.
"""

from __future__ import annotations

import posixpath
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from corral.contract.messages.replicas import ReplicaFile
from corral.contract.sources import is_safe_path
from corral.controller.files.model_files import ModelFiles
from corral.controller.localai import file_server
from corral.controller.localai.file_server import MODELS, FileServers
from corral.controller.localai.object_files import ObjectFiles
from corral.inference.load_options import LoadTarget, load_options, weights_of
from corral.kit.errors import CorralError, Failed, NotFound
from corral.kit.log import get_log

log = get_log(__name__)

GIB = 1024**3
SendFile = Callable[[str, Path, str, Callable[[int], None]], Awaitable[str]]  # key, file, digest; its path there


class Staged(NamedTuple):
    """One file: what it is called below the models folder here, and its whole path there."""

    path: str
    there: str


class StagingProgress(NamedTuple):
    """How far the files of one model are, all of them together."""

    file: str
    file_index: int  # from 1
    total_files: int
    current_bytes: int
    total_bytes: int


class NotHere(NotFound):
    """A file is gone from this controller."""


class PeerStaging:
    def __init__(self, servers: FileServers, files: ModelFiles, objects: ObjectFiles | None = None) -> None:
        """`objects`: where an object storage is configured."""
        self._servers = servers
        self._files = files
        self._objects = objects

    async def bring(
        self,
        node_id: str,
        where: file_server.FileServerAddress,
        files: Sequence[ReplicaFile],
        tell: Callable[[StagingProgress], None],
    ) -> tuple[Staged, ...]:
        """All of them, one after the other, as the contract has it: through the object storage where there is one, and
        else, or when that fails, to the worker's file server. Raises what keeps one from getting there."""
        objects = self._objects
        if objects is not None:

            async def by_storage(key: str, here: Path, digest: str, sent: Callable[[int], None]) -> str:
                return await objects.ensure(node_id, key, here, digest, sent)

            try:
                return await self._bring(files, tell, by_storage)
            except NotHere:
                raise
            except CorralError as error:
                if not where.url:
                    raise
                # All of them: a model's files lie below one folder, and the storage's is another one.
                log.warning("files go to the worker's file server instead", node=where.name, reason=error.message)
        if not where.url:
            raise Failed(f"{where.name} offers no file server: the model's files cannot be brought there")

        async def by_http(key: str, here: Path, digest: str, sent: Callable[[int], None]) -> str:
            return await self._servers.ensure(where, key, here, digest, sent)

        return await self._bring(files, tell, by_http)

    async def _bring(
        self, files: Sequence[ReplicaFile], tell: Callable[[StagingProgress], None], send: SendFile
    ) -> tuple[Staged, ...]:
        total, before = sum(file.size_bytes for file in files), 0
        staged = []
        for number, file in enumerate(files, 1):
            here = self._files.find(file.digest)
            if here is None:
                raise NotHere(f"{file.path} is not on this controller any more")

            def sent(count: int, file: ReplicaFile = file, number: int = number, before: int = before) -> None:
                tell(StagingProgress(file.path, number, len(files), before + count, total))

            sent(0)
            there = await send(MODELS + file.path, here, file.digest, sent)
            staged.append(Staged(file.path, there))
            before += file.size_bytes
        return tuple(staged)

    async def list_staged(
        self, where: file_server.FileServerAddress, definition: Mapping[str, Any]
    ) -> tuple[Staged, ...]:
        """Of a model whose files are not ours to bring: the weights it names, where they lie there already."""
        named = weights_of(definition)
        if not named or "://" in named or not is_safe_path(named):
            return ()
        try:
            head = await self._servers.head(where, MODELS + named)
            if head is not None and head.path and not head.target:
                return (Staged(named, head.path),)
            inside = [file for file in await self._servers.list_(where, MODELS + named) if is_safe_path(file)]
            if inside and (one := await self._servers.head(where, f"{MODELS}{named}/{inside[0]}")) and one.path:
                root = one.path.removesuffix(inside[0])
                return tuple(Staged(f"{named}/{file}", root + file) for file in inside)
        except CorralError as error:
            # Most such names are a hub's. Whether the backend finds it is its own business.
            log.info("no telling whether a model's weights are there", node=where.name, reason=error.message)
        return ()


def list_shared(files: Sequence[ReplicaFile], find: Callable[[str], Path | None]) -> tuple[Staged, ...]:
    """Files of a folder that all machines share, at the same place: nothing is sent. `find` gets a path below the
    folder. Raises NotHere."""
    found = [(file.path, find(file.path)) for file in files]
    if missing := [path for path, here in found if here is None]:
        raise NotHere(f"{missing[0]} is not in the shared models folder any more")
    return tuple(Staged(path, str(here)) for path, here in found)


def place_of(definition: Mapping[str, Any], staged: Sequence[Staged], *, set_depth: int) -> LoadTarget:
    """Where the definition's names lead there. `set_depth`: how many names stand before a file's own in its path, which
    are ours: the model's and its set's. Pure but for the seed."""
    seed = random.getrandbits(31)
    if not staged:
        return LoadTarget(folder="", seed=seed)
    own = {_own_path(file.path, set_depth): file.there for file in staged}
    first, there = next(iter(own.items()))
    if not there.endswith(f"/{first}"):
        raise Failed(f"its worker keeps {first} at {there[:200]!r}: names of the model's definition lead nowhere there")
    folder = there.removesuffix(f"/{first}")
    known = set(own.values())
    known |= {parent for path in own.values() for parent in _parents(path, folder)}
    named = weights_of(definition)
    wanted = posixpath.join(folder, named) if named and is_safe_path(named) else ""
    weights = wanted if wanted in known else there
    if named and is_safe_path(named) and wanted not in known:
        # A name that stands for one of its files by its ending only: `weights.gguf` for `sub/weights.gguf`.
        weights = next((path for path in own.values() if path.endswith(f"/{named}")), there)
        folder = weights.removesuffix(f"/{named}") if weights.endswith(f"/{named}") else folder
    return LoadTarget(folder=folder, model_file=weights, seed=seed, exists=known.__contains__)


def options_of(definition: Mapping[str, Any], model: str, backend: str, place: LoadTarget) -> str:
    """ModelOptions as JSON. Raises Invalid."""
    return msgspec.json.encode(load_options(definition, model, backend, place)).decode()


def load_timeout_s(size_bytes: int) -> float:
    """5 min and 20 s for each GiB of weights, at most 6 h (docs/reference/wire/routing.md#load-timeouts)."""
    return min(300.0 + 20.0 * size_bytes / GIB, 6 * 3600.0)


def _own_path(path: str, set_depth: int) -> str:
    return path.split("/", set_depth)[-1] if set_depth else path


def _parents(path: str, folder: str) -> list[str]:
    found = []
    while (path := posixpath.dirname(path)).startswith(f"{folder}/"):
        found.append(path)
    return found
