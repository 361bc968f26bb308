"""Resolves a backend's name and a machine to exact sources, or to the reasons why there are none
(docs/explanation/design.md#variants).

`variants.py` decides; this module looks up what the decision needs and calls it again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping

from corral.gallery.backends.catalogue import AliasGroup, BackendCatalogue, UnknownBackend
from corral.gallery.backends.direct import direct_entry
from corral.gallery.backends.entries import BackendEntry
from corral.gallery.backends.library import BackendLibrary
from corral.gallery.backends.locator import BuildLocation, BuildLocator, NotBuiltForPlatform
from corral.gallery.backends.resolution import Machine, ResolvedBackend, Unresolved, as_texts
from corral.gallery.backends.upgrades import AvailableBuild
from corral.gallery.backends.variants import ChosenVariant, NoVariant, choose_variant, no_build
from corral.gallery.pypi.lock import NoWheels
from corral.kit.errors import CorralError, Denied, Invalid, NotFound
from corral.kit.log import get_log

log = get_log(__name__)
_MAX_CONCURRENT_LOOKUPS = 8  # look-ups of one check


class Resolver:
    def __init__(self, library: BackendLibrary, locator: BuildLocator) -> None:
        self.library = library
        self._locator = locator

    def invalidate(self) -> None:
        """Discard cached answers of galleries, registries and package indexes."""
        self.library.invalidate()
        self._locator.invalidate()

    async def resolve(self, backend: str, machine: Machine) -> ResolvedBackend | Unresolved:
        """Returns `Unresolved` instead of raising for errors of galleries and registries."""
        return (await self.resolve_all(backend, [machine]))[machine]

    async def resolve_all(
        self, backend: str, machines: Iterable[Machine]
    ) -> dict[Machine, ResolvedBackend | Unresolved]:
        """Resolve for every kind of machine of a fleet; nodes with equal machines are resolved once."""
        kinds = sorted(set(machines))
        found, catalogue = await self.library.find(backend)
        if isinstance(found, UnknownBackend):
            refused = Unresolved(found.reason, permanent=not found.unread, nearest=found.nearest)
            return dict.fromkeys(kinds, refused)
        if isinstance(found, BackendEntry) and found.is_meta:
            pairs = [(machine.capability, machine.platform) for machine in kinds]
            catalogue = await self.library.with_builds(found, catalogue, pairs)
        async with asyncio.TaskGroup() as tasks:
            work = [tasks.create_task(self._resolve(backend, found, catalogue, machine)) for machine in kinds]
        return {machine: task.result() for machine, task in zip(kinds, work, strict=True)}

    async def choose(self, backend: str, machine: Machine) -> BackendEntry | None:
        """The entry for such a machine. Does not query registries."""
        found, catalogue = await self.library.find(backend)
        if isinstance(found, UnknownBackend):
            return None
        if isinstance(found, BackendEntry) and found.is_meta:
            catalogue = await self.library.with_builds(found, catalogue, [(machine.capability, machine.platform)])
        choice = choose_variant(
            found, catalogue, capability=machine.capability, platform=machine.platform, platforms={}
        )
        return None if isinstance(choice, NoVariant) else choice.entry

    async def resolve_uri(
        self, uri: str, machine: Machine, *, name: str = "", alias: str = ""
    ) -> ResolvedBackend | Unresolved:
        """Resolve a URI that is in no gallery."""
        try:
            entry = direct_entry(uri, name=name, alias=alias)
        except Invalid as error:
            return Unresolved(error.message, permanent=True)
        return await self._resolve(entry.name, entry, BackendCatalogue(()), machine)

    async def available(
        self, needed: Mapping[tuple[str, str], tuple[BackendEntry, Machine]]
    ) -> dict[tuple[str, str], AvailableBuild]:
        """The available builds that `upgrades` compares with. A source that does not answer is left out."""
        turn = asyncio.Semaphore(_MAX_CONCURRENT_LOOKUPS)
        answers: dict[tuple[str, str], AvailableBuild] = {}

        async def query(key: tuple[str, str], entry: BackendEntry, machine: Machine) -> None:
            async with turn:
                try:
                    located = await self._locator.locate(entry, machine)
                except CorralError as error:
                    log.info("source could not be queried", backend=entry.id, error=error.message)
                else:
                    answers[key] = AvailableBuild(located.digest, located.version)

        async with asyncio.TaskGroup() as tasks:
            for key, (entry, machine) in needed.items():
                tasks.create_task(query(key, entry, machine))
        return answers

    async def _resolve(
        self, backend: str, wanted: BackendEntry | AliasGroup, catalogue: BackendCatalogue, machine: Machine
    ) -> ResolvedBackend | Unresolved:
        platforms: dict[str, frozenset[str]] = {}
        missing: dict[str, str] = {}
        while True:  # terminates: each round that does not return excludes one build
            choice = choose_variant(
                wanted,
                catalogue,
                capability=machine.capability,
                platform=machine.platform,
                platforms=platforms,
                missing=missing,
            )
            if isinstance(choice, NoVariant):
                return Unresolved(choice.reason, permanent=not catalogue.unread, tried=as_texts(choice.tried))
            try:
                located = await self._locator.locate(choice.entry, machine)
            except NotBuiltForPlatform as error:
                platforms[choice.entry.id] = error.platforms - {machine.platform}
            except NoWheels as error:
                log.info("no wheels", backend=choice.entry.id, platform=machine.platform, error=error.message)
                missing[choice.entry.id] = no_build(machine.platform)
            except NotFound as error:
                missing[choice.entry.id] = error.message
            except CorralError as error:
                permanent = isinstance(error, Denied | Invalid)
                return Unresolved(error.message, permanent=permanent, tried=as_texts(choice.tried))
            else:
                return _resolved(backend, choice, located)


def _resolved(backend: str, choice: ChosenVariant, located: BuildLocation) -> ResolvedBackend:
    entry = choice.entry
    return ResolvedBackend(
        backend=backend,
        variant=entry.name,
        alias=entry.alias,
        version=entry.version or located.version,
        gallery_url=entry.gallery.url,
        digest=located.digest,
        sources=located.sources,
        manifest=entry.manifest,
        reason=choice.reason,
        tried=as_texts(choice.tried),
        note=choice.note,
    )
