"""A backend's name and a machine in, exact sources out, or a refusal with its reasons
(docs/explanation/design.md#variants).

Nothing is decided here that `variants.py` does not decide: this asks it, looks up what it needs to know, asks again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping

from corral.gallery.backends.catalogue import AliasGroup, Catalogue, Unknown
from corral.gallery.backends.direct import direct_entry
from corral.gallery.backends.entries import BackendEntry
from corral.gallery.backends.library import Library
from corral.gallery.backends.locator import Located, Locator, NotBuilt
from corral.gallery.backends.machine import Machine
from corral.gallery.backends.resolution import Refused, Resolved, as_texts
from corral.gallery.backends.upgrades import Available
from corral.gallery.backends.variants import Chosen, NoVariant, choose_variant, no_build
from corral.gallery.pypi.lock import NoWheels
from corral.kit.errors import CorralError, Denied, Invalid, NotFound
from corral.kit.log import get_log

log = get_log(__name__)
_AT_ONCE = 8  # look-ups of one check


class Resolver:
    def __init__(self, library: Library, locator: Locator) -> None:
        self.library = library
        self._locator = locator

    def forget(self) -> None:
        """What galleries, registries and package indexes said lately counts no more: what is there now is wanted."""
        self.library.forget()
        self._locator.forget()

    async def resolve(self, backend: str, machine: Machine) -> Resolved | Refused:
        """Never raises for what is wrong with the world; it says so."""
        return (await self.resolve_all(backend, [machine]))[machine]

    async def resolve_all(self, backend: str, machines: Iterable[Machine]) -> dict[Machine, Resolved | Refused]:
        """For every kind of machine of a fleet. Nodes that are the same machine are resolved once."""
        kinds = sorted(set(machines))
        found, catalogue = await self.library.find(backend)
        if isinstance(found, Unknown):
            refused = Refused(found.reason, permanent=not found.unread, nearest=found.nearest)
            return dict.fromkeys(kinds, refused)
        if isinstance(found, BackendEntry) and found.is_meta:
            pairs = [(machine.capability, machine.platform) for machine in kinds]
            catalogue = await self.library.with_builds(found, catalogue, pairs)
        async with asyncio.TaskGroup() as tasks:
            work = [tasks.create_task(self._resolve(backend, found, catalogue, machine)) for machine in kinds]
        return {machine: task.result() for machine, task in zip(kinds, work, strict=True)}

    async def choose(self, backend: str, machine: Machine) -> BackendEntry | None:
        """The entry that galleries have for such a machine. No registry is asked whether it is there."""
        found, catalogue = await self.library.find(backend)
        if isinstance(found, Unknown):
            return None
        if isinstance(found, BackendEntry) and found.is_meta:
            catalogue = await self.library.with_builds(found, catalogue, [(machine.capability, machine.platform)])
        choice = choose_variant(
            found, catalogue, capability=machine.capability, platform=machine.platform, platforms={}
        )
        return None if isinstance(choice, NoVariant) else choice.entry

    async def resolve_uri(self, uri: str, machine: Machine, *, name: str = "", alias: str = "") -> Resolved | Refused:
        """What somebody wants installed that is in no gallery."""
        try:
            entry = direct_entry(uri, name=name, alias=alias)
        except Invalid as error:
            return Refused(error.message, permanent=True)
        return await self._resolve(entry.name, entry, Catalogue(()), machine)

    async def available(
        self, needed: Mapping[tuple[str, str], tuple[BackendEntry, Machine]]
    ) -> dict[tuple[str, str], Available]:
        """What `upgrades` compares with. A source that does not answer is left out: no news is no upgrade."""
        turn = asyncio.Semaphore(_AT_ONCE)
        answers: dict[tuple[str, str], Available] = {}

        async def look_up(key: tuple[str, str], entry: BackendEntry, machine: Machine) -> None:
            async with turn:
                try:
                    located = await self._locator.locate(entry, machine)
                except CorralError as error:
                    log.info("source could not be looked up", backend=entry.id, error=error.message)
                else:
                    answers[key] = Available(located.digest, located.version)

        async with asyncio.TaskGroup() as tasks:
            for key, (entry, machine) in needed.items():
                tasks.create_task(look_up(key, entry, machine))
        return answers

    async def _resolve(
        self, backend: str, wanted: BackendEntry | AliasGroup, catalogue: Catalogue, machine: Machine
    ) -> Resolved | Refused:
        platforms: dict[str, frozenset[str]] = {}
        missing: dict[str, str] = {}
        while True:  # ends: each round that does not return takes one build out
            choice = choose_variant(
                wanted,
                catalogue,
                capability=machine.capability,
                platform=machine.platform,
                platforms=platforms,
                missing=missing,
            )
            if isinstance(choice, NoVariant):
                return Refused(choice.reason, permanent=not catalogue.unread, tried=as_texts(choice.tried))
            try:
                located = await self._locator.locate(choice.entry, machine)
            except NotBuilt as error:
                platforms[choice.entry.id] = error.platforms - {machine.platform}
            except NoWheels as error:
                log.info("no wheels", backend=choice.entry.id, platform=machine.platform, error=error.message)
                missing[choice.entry.id] = no_build(machine.platform)
            except NotFound as error:
                missing[choice.entry.id] = error.message
            except CorralError as error:
                permanent = isinstance(error, Denied | Invalid)
                return Refused(error.message, permanent=permanent, tried=as_texts(choice.tried))
            else:
                return _resolved(backend, choice, located)


def _resolved(backend: str, choice: Chosen, located: Located) -> Resolved:
    entry = choice.entry
    return Resolved(
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
