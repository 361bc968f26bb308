"""Looks up whether a backend has a build for a kind of machine: in the galleries, in the background, with a cache.

Placement must not wait for the network, and must not choose a node on which the backend cannot run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import partial

from corral.contract.manifest import GRPC, can_continue
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

MAX_PARALLEL = 8


@dataclass(frozen=True)
class _Found:
    build: Build
    until: float


class _Question(StrEnum):
    CORRAL = "a build for a Corral worker"
    LOCALAI = "a build for a LocalAI worker"
    INSTALLED = "the devices of an installed build"


Key = tuple[str, MachineKind, _Question]


class Builds(KeyedTasks[Key]):
    """`async with` it. `on_found` is called when a lookup ended."""

    def __init__(
        self,
        catalogue: Catalogue,
        clock: Clock,
        *,
        on_found: Callable[[], None],
        fresh_s: float = 300.0,
        again_s: float = 5.0,
    ) -> None:
        super().__init__()
        self._catalogue = catalogue
        self._clock = clock
        self._on_found = on_found
        self._fresh_s = fresh_s
        self._again_s = again_s
        self._known: dict[Key, _Found] = {}
        self._slots = asyncio.Semaphore(MAX_PARALLEL)

    def for_corral(self, backend: str, machine: MachineKind) -> Build:
        """The cached build; a missing or stale one is being looked up when this returns."""
        return self._find((backend, machine, _Question.CORRAL), Build(BuildState.LOOKING_UP))

    def for_localai(self, backend: str, machine: MachineKind) -> Build:
        """The same for a LocalAI worker, which looks up builds itself, in galleries it can read."""
        return self._find((backend, machine, _Question.LOCALAI), Build(BuildState.LOOKING_UP))

    def installed(self, backend: str, machine: MachineKind) -> Build:
        """The same for an installed backend: galleries may know its devices; registries are not asked."""
        return self._find((backend, machine, _Question.INSTALLED), Build(BuildState.INSTALLED))

    def _find(self, key: Key, meanwhile: Build) -> Build:
        known = self._known.get(key)
        if known is None or known.until <= self._clock.monotonic():
            self.start(key, partial(self._look_up, key), name=f"build of {key[0]}")
        return known.build if known is not None else meanwhile

    def is_looking_up(self, backend: str) -> bool:
        """Whether a first lookup is running; a refresh does not count."""
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
            async with self._slots:
                ask = self._ask_for_localai if question is _Question.LOCALAI else self._ask
                build = await ask(backend, machine)
        except CorralError as error:
            build, fresh_s = Build(BuildState.UNKNOWN, f"the lookup of its build failed: {error.message}"), 0.0
        except Exception:
            log.exception("build lookup failed", backend=backend)
            build, fresh_s = Build(BuildState.UNKNOWN, "the lookup of its build failed; see the controller's log"), 0.0
        self._known[key] = _Found(build, self._clock.monotonic() + (fresh_s or self._again_s))
        self._on_found()

    async def _look_up_installed(self, key: Key) -> None:
        """Without a gallery its devices are unknown, and it is used all the same."""
        backend, machine, _ = key
        devices, continues = "", False
        try:
            async with self._slots:
                manifest = await self._catalogue.manifest(BackendRequest(backend), machine)
            devices, continues = manifest.devices if manifest is not None else "", can_continue(manifest)
        except CorralError as error:
            log.debug("no gallery knows an installed backend", backend=backend, error=error.message)
        except Exception:
            log.exception("lookup of an installed backend failed", backend=backend)
        build = Build(BuildState.INSTALLED, devices=devices, continues=continues)
        changed = (known := self._known.get(key)) is None or known.build != build
        self._known[key] = _Found(build, self._clock.monotonic() + self._fresh_s)
        if changed and devices:
            self._on_found()

    async def _ask(self, backend: str, machine: MachineKind) -> Build:
        try:
            listed = await self._catalogue.look_up(BackendRequest(backend))
            found = await self._catalogue.resolve(listed.request or BackendRequest(listed.name), machine)
        except (NotFound, Invalid) as error:
            return Build(BuildState.MISSING, error.message)
        if isinstance(found, NoBuild):
            return Build(BuildState.MISSING, found.reason)
        devices = found.manifest.devices if found.manifest is not None else ""
        continues = can_continue(found.manifest)
        return Build(BuildState.INSTALLABLE, devices=devices, size_bytes=found.size_bytes, continues=continues)

    async def _ask_for_localai(self, backend: str, machine: MachineKind) -> Build:
        """The build that the worker would find: in the galleries that it can read, not in the built-in one."""
        last_error: CorralError | None = None
        for gallery in self._catalogue.galleries():
            try:
                listed = await self._catalogue.look_up(BackendRequest(backend, gallery=str(gallery.get("name", ""))))
                found = await self._catalogue.resolve(listed.request or BackendRequest(listed.name), machine)
            except (NotFound, Invalid):
                continue
            except CorralError as error:  # another gallery may have it
                last_error = error
                continue
            if isinstance(found, NoBuild):
                return Build(BuildState.MISSING, found.reason)
            if found.manifest is not None and found.manifest.protocol != GRPC:
                return Build(BuildState.MISSING, "it speaks OpenAI's HTTP, and a LocalAI worker runs gRPC only")
            return Build(BuildState.INSTALLABLE, size_bytes=found.size_bytes)
        if last_error is not None:
            raise last_error
        return Build(BuildState.MISSING, NO_GALLERY_FOR_LOCALAI)
