"""Whether there is a build of a backend for a kind of machine: asked of the galleries in the background, and kept.

Placing must not wait for the network, and must not choose a node on which the backend cannot run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import partial

from corral.contract.manifest import GRPC
from corral.controller.backends.catalogue import Catalogue, MachineKind
from corral.controller.backends.plan import NoBuild
from corral.controller.orders.order import NO_GALLERY_FOR_LOCALAI
from corral.controller.scheduler.world import Build, BuildState
from corral.kit.clock import Clock
from corral.kit.errors import CorralError, Invalid, NotFound
from corral.kit.log import get_log
from corral.kit.tasks import KeyedTasks
from corral.store.records import BackendRequest

log = get_log(__name__)

_AT_ONCE = 8


@dataclass(frozen=True)
class _Found:
    build: Build
    until: float


class _Question(StrEnum):
    OWN = "a build for a Corral worker"
    LOCALAI = "a build for a worker of LocalAI's"
    INSTALLED = "how a build runs that is installed"


Key = tuple[str, MachineKind, _Question]


class Builds(KeyedTasks[Key]):
    """`async with` it. `found` is called when something was found out."""

    def __init__(
        self,
        catalogue: Catalogue,
        clock: Clock,
        *,
        found: Callable[[], None],
        fresh_s: float = 300.0,
        again_s: float = 5.0,
    ) -> None:
        super().__init__()
        self._catalogue = catalogue
        self._clock = clock
        self._found = found
        self._fresh_s = fresh_s
        self._again_s = again_s
        self._known: dict[Key, _Found] = {}
        self._turn = asyncio.Semaphore(_AT_ONCE)

    def of(self, backend: str, machine: MachineKind) -> Build:
        """What is known; what is not, or no longer certain, is being looked up when this returns."""
        return self._of((backend, machine, _Question.OWN), Build(BuildState.LOOKING_UP))

    def for_localai(self, backend: str, machine: MachineKind) -> Build:
        """The same for a worker of LocalAI's, which looks builds up itself, in galleries it can read."""
        return self._of((backend, machine, _Question.LOCALAI), Build(BuildState.LOOKING_UP))

    def installed(self, backend: str, machine: MachineKind) -> Build:
        """Of one that is there already. Galleries may know how it runs; registries are not asked."""
        return self._of((backend, machine, _Question.INSTALLED), Build(BuildState.INSTALLED))

    def _of(self, key: Key, meanwhile: Build) -> Build:
        known = self._known.get(key)
        if known is None or known.until <= self._clock.monotonic():
            self.start(key, partial(self._look_up, key), name=f"build of {key[0]}")
        return known.build if known is not None else meanwhile

    def is_looking(self, backend: str) -> bool:
        """For the first time: what is only refreshed is known."""
        return any(
            key[0] == backend and key[2] is not _Question.INSTALLED and key not in self._known for key in self.running()
        )

    async def _look_up(self, key: Key) -> None:
        backend, machine, question = key
        fresh_s = self._fresh_s
        if question is _Question.INSTALLED:
            await self._look_up_installed(key)
            return
        try:
            async with self._turn:
                ask = self._ask_for_localai if question is _Question.LOCALAI else self._ask
                build = await ask(backend, machine)
        except CorralError as error:
            build, fresh_s = Build(BuildState.UNKNOWN, f"its build could not be found out: {error.message}"), 0.0
        except Exception:
            log.exception("looking up a build failed", backend=backend)
            build, fresh_s = Build(BuildState.UNKNOWN, "its build could not be found out; the log says why"), 0.0
        self._known[key] = _Found(build, self._clock.monotonic() + (fresh_s or self._again_s))
        self._found()

    async def _look_up_installed(self, key: Key) -> None:
        """Without galleries nothing is known of how it runs, and it is used all the same."""
        backend, machine, _ = key
        devices = ""
        try:
            async with self._turn:
                manifest = await self._catalogue.manifest(BackendRequest(backend), machine)
            devices = manifest.devices if manifest is not None else ""
        except CorralError as error:
            log.debug("galleries say nothing of an installed backend", backend=backend, error=error.message)
        except Exception:
            log.exception("looking up an installed backend failed", backend=backend)
        build = Build(BuildState.INSTALLED, devices=devices)
        changed = (known := self._known.get(key)) is None or known.build != build
        self._known[key] = _Found(build, self._clock.monotonic() + self._fresh_s)
        if changed and devices:
            self._found()

    async def _ask(self, backend: str, machine: MachineKind) -> Build:
        try:
            listed = await self._catalogue.look_up(BackendRequest(backend))
            found = await self._catalogue.resolve(listed.request or BackendRequest(listed.name), machine)
        except (NotFound, Invalid) as error:
            return Build(BuildState.MISSING, error.message)
        if isinstance(found, NoBuild):
            return Build(BuildState.MISSING, found.reason)
        devices = found.manifest.devices if found.manifest is not None else ""
        return Build(BuildState.INSTALLABLE, devices=devices, size_bytes=found.size_bytes)

    async def _ask_for_localai(self, backend: str, machine: MachineKind) -> Build:
        """What its worker would find: names mean what the galleries it can read have under them, not what ours has."""
        trouble: CorralError | None = None
        for gallery in self._catalogue.galleries():
            try:
                listed = await self._catalogue.look_up(BackendRequest(backend, gallery=str(gallery.get("name", ""))))
                found = await self._catalogue.resolve(listed.request or BackendRequest(listed.name), machine)
            except (NotFound, Invalid):
                continue
            except CorralError as error:  # another one may know it
                trouble = error
                continue
            if isinstance(found, NoBuild):
                return Build(BuildState.MISSING, found.reason)
            if found.manifest is not None and found.manifest.protocol != GRPC:
                return Build(BuildState.MISSING, "it speaks OpenAI's HTTP, and a LocalAI worker runs gRPC only")
            return Build(BuildState.INSTALLABLE, size_bytes=found.size_bytes)
        if trouble is not None:
            raise trouble
        return Build(BuildState.MISSING, NO_GALLERY_FOR_LOCALAI)
