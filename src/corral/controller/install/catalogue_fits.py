"""Tells on which nodes the built-in models fit, by the scheduler's own estimate.

The built-in list has few sizes: a file without one is looked up at its server, once per controller, by its headers.
Entries of other galleries are not looked up: they are thousands.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import MappingProxyType

import msgspec

from corral.contract.catalogue import AvailableModel
from corral.contract.models import Definition, ModelFile
from corral.controller.files.file_resolver import ResolvedFile
from corral.controller.install.choose import fitting_nodes, planned_model
from corral.controller.install.planner import FleetMemory
from corral.controller.scheduler.placement import evaluate_nodes
from corral.controller.scheduler.world import World
from corral.gallery.models.definition import make_definition
from corral.gallery.models.entries import read_built_in_models
from corral.kit.clock import Clock
from corral.kit.errors import CorralError
from corral.kit.humanize import format_bytes
from corral.kit.log import get_log
from corral.kit.tasks import Wake

log = get_log(__name__)

FindFile = Callable[[ModelFile], Awaitable[ResolvedFile]]
MAX_PARALLEL_LOOKUPS = 4
MAX_REASONS = 3


class SizeLookups:
    """The sizes of files as their servers report them."""

    name = "sizes of built-in models"

    def __init__(self, find: FindFile, clock: Clock, *, again_s: float = 600.0) -> None:
        """`again_s`: a file whose server did not answer is looked up again after this time."""
        self._find = find
        self._clock = clock
        self._again_s = again_s
        self._sizes: dict[str, int] = {}  # by URI
        self._next_at: dict[str, float] = {}  # of files that were requested
        self._wanted: dict[str, ModelFile] = {}
        self._wake = Wake()
        self._idle = asyncio.Event()
        self._idle.set()

    def size_of(self, file: ModelFile) -> int:
        """0: not known."""
        return file.size_bytes or self._sizes.get(file.uri, 0)

    async def request(self, files: Sequence[ModelFile], *, wait_s: float) -> None:
        """Look up the sizes that are not known, and wait for them a short time; the lookups go on."""
        now = self._clock.monotonic()
        due = {file.uri: file for file in files if not self.size_of(file) and self._next_at.get(file.uri, now) <= now}
        if not due:
            return
        self._wanted |= due
        self._next_at |= dict.fromkeys(due, now + self._again_s)
        self._idle.clear()
        self._wake.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._idle.wait()

    async def run(self) -> None:
        while True:
            await self._wake.wait(self._again_s)
            while self._wanted:
                chosen = [self._wanted.pop(uri) for uri in list(self._wanted)[:MAX_PARALLEL_LOOKUPS]]
                async with asyncio.TaskGroup() as tasks:
                    for file in chosen:
                        tasks.create_task(self._look_up(file))
            self._idle.set()

    async def _look_up(self, file: ModelFile) -> None:
        try:
            self._sizes[file.uri] = (await self._find(file)).size_bytes
        except CorralError as error:
            log.info("size of a model file not found", uri=file.uri, reason=error.message)
        except Exception:
            log.exception("size of a model file not found", uri=file.uri)


class CatalogueFits:
    def __init__(
        self,
        fleet: FleetMemory,
        sizes: SizeLookups,
        *,
        definitions: Mapping[str, Definition] | None = None,
        wait_s: float = 2.0,
    ) -> None:
        """`definitions`: by id of the entry; None: of the built-in models."""
        self._fleet = fleet
        self._sizes = sizes
        self._definitions = built_in_definitions() if definitions is None else definitions
        self._wait_s = wait_s

    async def add_to(self, entries: Sequence[AvailableModel]) -> list[AvailableModel]:
        """The same entries, built-in ones with their sizes and the nodes on which they fit."""
        shown = {entry.id: self._definitions[entry.id] for entry in entries if entry.id in self._definitions}
        if not shown:
            return list(entries)
        files = [file for definition in shown.values() for file in definition.files]
        await self._sizes.request(files, wait_s=self._wait_s)
        world = await self._fleet.world(sorted({definition.backend for definition in shown.values()}))
        return [self._with_fit(entry, shown[entry.id], world) if entry.id in shown else entry for entry in entries]

    def _with_fit(self, entry: AvailableModel, definition: Definition, world: World) -> AvailableModel:
        sizes = [self._sizes.size_of(file) for file in definition.files]
        size_bytes = sum(sizes) if all(sizes) else 0
        if not size_bytes:
            return msgspec.structs.replace(entry, fit_note="its size is not known before it is fetched")
        verdicts = evaluate_nodes(world, planned_model(definition, size_bytes, None))
        nodes, why_not = fitting_nodes(verdicts)
        reasons = "; ".join(why_not[:MAX_REASONS]) or "there are no nodes"
        return msgspec.structs.replace(
            entry,
            size=entry.size or format_bytes(size_bytes),
            size_bytes=size_bytes,
            fits_on=tuple(each.node for each in nodes),
            fit_note="" if nodes else f"fits on no node: {reasons}",
        )


@functools.cache
def built_in_definitions() -> Mapping[str, Definition]:
    return MappingProxyType({entry.id: make_definition(entry, None) for entry in read_built_in_models().entries})
