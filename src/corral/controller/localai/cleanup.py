"""Takes from LocalAI workers what of ours nobody needs there any more: files of deleted and edited models, and what is
left of requests whose controller died. Nothing on such a worker ever goes by itself.

`ObjectSweep` does the same in an object storage.

Ours is what lies as we put it: `<model>/<twelve hex digits>/…` below the models folder, each file with the digest
beside it that the file server writes. It has to be unwanted at two looks, an hour apart.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Collection, Iterable
from datetime import timedelta

from corral.blobs.object_store import ObjectStore
from corral.controller.localai.calls import PeerCalls
from corral.controller.localai.file_server import MODELS, FileServerAddress, FileServers
from corral.controller.localai.needs import KnownFiles
from corral.controller.localai.object_files import FLEET
from corral.controller.localai.request_files import EPHEMERAL, RequestFiles
from corral.controller.localai.table import PeerTable
from corral.controller.models.views import definition_of
from corral.kit.clock import Clock
from corral.kit.errors import CorralError
from corral.kit.log import get_log
from corral.kit.tasks import run_every
from corral.store.engine.transactions import Store
from corral.store.tables import models, nodes, peer_processes
from corral.store.tables.nodes import Node

log = get_log(__name__)

_OURS = re.compile(r"(?P<folder>(?P<model>.+?)/[0-9a-f]{12})/(?P<file>.+)\Z")
_DIGEST = ".sha256"
EPHEMERAL_AFTER = timedelta(hours=1)  # no request takes longer
OBJECTS_EVERY_S = 900.0


def _has_digests(files: set[str]) -> bool:
    """Whether each file has the digest beside it that the file server writes."""
    return all(
        file.endswith((_DIGEST, f"{_DIGEST}.target")) or {f"{file}{_DIGEST}", f"{file}{_DIGEST}.target"} & files
        for file in files
    )


def unwanted_sets(
    listed: Iterable[str],
    wanted: Collection[str],
    undecided: Collection[str],
    *,
    is_sent_by_us: Callable[[set[str]], bool] = _has_digests,
) -> set[str]:
    """Folders of ours among these paths that are not wanted, but for those of models of which nobody can say. Pure."""
    found: dict[str, set[str]] = {}
    for path in listed:
        named = _OURS.match(path)
        if named is not None and named["folder"] not in wanted and named["model"] not in undecided:
            found.setdefault(named["folder"], set()).add(named["file"])
    return {folder for folder, files in found.items() if is_sent_by_us(files)}


class PeerCleanup:
    name = "sweeping peers"

    def __init__(
        self,
        store: Store,
        calls: PeerCalls,
        servers: FileServers,
        files: KnownFiles,
        requests: RequestFiles,
        table: PeerTable,
        clock: Clock,
        *,
        every_s: float = 3600.0,
    ) -> None:
        self._store = store
        self._calls = calls
        self._servers = servers
        self._files = files
        self._requests = requests
        self._table = table
        self._clock = clock
        self._every_s = every_s
        self._unwanted: dict[str, set[str]] = {}  # by node, at the last look

    async def run(self) -> None:
        await run_every(self.name, self._every_s, self.run_once, clock=self._clock)

    async def run_once(self) -> None:
        if not self._table.leads:
            self._unwanted.clear()
            return
        async with self._store.read() as tx:
            found = [node for node in await nodes.list_(tx) if node.shares_token and node.approved]
        there = [node for node in found if node.status == "healthy" and not node.bus_down and node.ingress_url]
        for node in there:
            try:
                await self._sweep(node)
            except CorralError as error:
                log.info("what nobody needs could not be looked for", node=node.name, error=error.message)
        self._unwanted = {node.id: self._unwanted.get(node.id, set()) for node in there}

    async def _sweep(self, node: Node) -> None:
        where = FileServerAddress(node.name, node.ingress_url)
        await self._requests.sweep(node.id, where)
        listed = await self._servers.list_(where, MODELS)
        # Asked after the list was made: what has been sent since is not on it.
        wanted, undecided = await self.wanted()
        unwanted = unwanted_sets(listed, wanted, undecided)
        for folder in sorted(unwanted & self._unwanted.get(node.id, set())):
            log.info("files that no model needs are removed", node=node.name, folder=folder)
            await self._calls.delete_folder(node.id, folder)
        self._unwanted[node.id] = unwanted

    async def wanted(self) -> tuple[set[str], set[str]]:
        """Folders of models as they are; and models of which processes run, perhaps of an earlier revision, or whose
        files nobody knows yet."""
        async with self._store.read() as tx:
            rows = await models.list_(tx)
            running = await peer_processes.list_(tx)
        wanted, undecided = set(), {process.model for process in running}
        for row in rows:
            definition = definition_of(row)
            known = await self._files.known(definition) if definition is not None else None
            if known is None:
                undecided.add(row.id)
            for file in known or ():
                if (named := _OURS.match(file.path)) is not None:
                    wanted.add(named["folder"])
        return wanted, undecided


class ObjectSweep:
    """Deletes objects of requests after an hour, and those of models that this fleet does not have any more."""

    name = "sweep of the object storage"

    def __init__(
        self,
        objects: ObjectStore,
        clock: Clock,
        *,
        fleet: str,
        leads: Callable[[], bool],
        wanted: Callable[[], Awaitable[tuple[set[str], set[str]]]],
        every_s: float = OBJECTS_EVERY_S,
    ) -> None:
        """`wanted`: the folders of the present models, and the models whose folders are not known."""
        self._objects = objects
        self._fleet = fleet
        self._clock = clock
        self._leads = leads
        self._wanted = wanted
        self._every_s = every_s
        self._unwanted: set[str] = set()  # at the last pass

    async def run(self) -> None:
        await run_every(self.name, self._every_s, self.run_once, clock=self._clock)

    async def run_once(self) -> None:
        if not self._leads():
            self._unwanted.clear()
            return
        try:
            await self._sweep_requests()
            await self._sweep_models()
        except CorralError as error:
            log.info("the object storage could not be swept", reason=error.message)

    async def _sweep_requests(self) -> None:
        before = self._clock.now() - EPHEMERAL_AFTER
        async for found in self._objects.list_(EPHEMERAL):
            if found.modified_at < before and (await self._objects.get(found.key)).created_at < before:
                log.info("object of a request that no controller deleted", key=found.key)
                await self._objects.delete(found.key)

    async def _sweep_models(self) -> None:
        """In two passes, as on the workers. Only objects with our mark: the bucket may serve other fleets too."""
        keys = [found.key.removeprefix(MODELS) async for found in self._objects.list_(MODELS)]
        wanted, undecided = await self._wanted()
        unwanted = unwanted_sets(keys, wanted, undecided, is_sent_by_us=lambda _files: True)
        for folder in sorted(unwanted & self._unwanted):
            for key in (f"{MODELS}{key}" for key in keys if key.startswith(f"{folder}/")):
                if (await self._objects.get(key)).metadata.get(FLEET) == self._fleet:
                    log.info("file of a former model is deleted in the object storage", key=key)
                    await self._objects.delete(key)
        self._unwanted = unwanted
