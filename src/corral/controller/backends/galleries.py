"""Implements the `Catalogue` of the controller with `gallery/` and the registry client of `blobs/`.

Galleries are read when they are first needed, and a gallery that cannot be read lacks only its own entries. A request
may contain galleries of its own; they are read for this request alone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from corral.blobs.oci.credentials import DockerConfig
from corral.blobs.oci.registry import RegistryClient, RegistrySettings
from corral.contract.hardware import DEFAULT, DISABLED
from corral.contract.manifest import Manifest
from corral.contract.messages.backends import UpgradeInfo
from corral.contract.sources import Registry
from corral.controller.backends.bundled_upgrades import split_bundled
from corral.controller.backends.catalogue import BundledBuilds, CatalogueEntry, MachineKind, NodeInventory
from corral.controller.backends.plan import NoBuild
from corral.controller.orders.order import NO_GALLERY_FOR_LOCALAI
from corral.gallery.backends import upgrades as rules
from corral.gallery.backends.catalogue import AliasGroup, UnknownBackend, split_query
from corral.gallery.backends.compatibility import is_hardware_specific
from corral.gallery.backends.direct import direct_entry, why_not_for_localai
from corral.gallery.backends.entries import BackendEntry
from corral.gallery.backends.factory import GalleryOptions, make_resolver
from corral.gallery.backends.library import BackendLibrary
from corral.gallery.backends.resolution import Machine, ResolvedBackend, Unresolved
from corral.gallery.backends.resolver import Resolver
from corral.gallery.galleries import BUILT_IN, Gallery, parse_galleries
from corral.kit.clock import Clock
from corral.kit.errors import CorralError, Invalid, NotFound, Unavailable
from corral.kit.log import get_log
from corral.store.records import BackendRequest, TargetBuild

log = get_log(__name__)

MAX_REQUEST_RESOLVERS = 8  # resolvers for galleries of requests that are kept


class Galleries:
    """`reading` makes a resolver for the galleries of a request."""

    def __init__(
        self,
        resolver: Resolver,
        reading: Callable[[tuple[Gallery, ...]], Resolver],
        bundled: BundledBuilds | None = None,
    ) -> None:
        self._bundled = bundled
        self._resolver = resolver
        self._reading = reading
        self._others: OrderedDict[tuple[Gallery, ...], Resolver] = OrderedDict()

    async def look_up(self, request: BackendRequest) -> CatalogueEntry:
        if self._bundled is not None and (bundled := self._bundled.find_entry(request)) is not None:
            return bundled
        if request.uri:
            entry = direct_entry(request.uri, name=request.backend, alias=request.alias)
            return CatalogueEntry(entry.name, request=msgspec.structs.replace(request, backend=entry.name))
        found, catalogue = await self._resolver_for(request).library.find(_query(request))
        gallery = request.gallery or split_query(request.backend)[0]
        match found:
            case UnknownBackend():
                raise _not_found(found, gallery)
            case AliasGroup(alias=alias):
                return CatalogueEntry(alias, request=msgspec.structs.replace(request, backend=alias, gallery=gallery))
            case BackendEntry():
                meta = catalogue.meta_of(found) if is_hardware_specific(found) else None
                return CatalogueEntry(
                    found.name,
                    hardware_specific=is_hardware_specific(found),
                    meta_alternative=meta.name if meta is not None else "",
                    request=msgspec.structs.replace(request, backend=found.name, gallery=gallery),
                )

    async def resolve(self, request: BackendRequest, kind: MachineKind) -> TargetBuild | NoBuild:
        if self._bundled is None or not kind.platform:  # a LocalAI worker fetches by itself
            return await self._resolve(request, kind)
        if (bundled := self._bundled.find_build(request, kind)) is not None:
            return bundled
        try:
            return await self._resolve(request, kind)
        except CorralError as error:
            if why := self._bundled.why_no_build(request, kind):
                raise Unavailable(f"{why}; {error.message}") from error
            raise

    async def _resolve(self, request: BackendRequest, kind: MachineKind) -> TargetBuild | NoBuild:
        machine, resolver = _machine(kind), self._resolver_for(request)
        if request.uri and not kind.platform and (why := why_not_for_localai(request.uri)):
            return NoBuild(why)
        if request.uri:
            found = await resolver.resolve_uri(request.uri, machine, name=request.backend, alias=request.alias)
        elif kind.platform:
            found = await resolver.resolve(_query(request), machine)
        else:
            found = await self._resolve_for_peer(request, resolver, machine)
        if isinstance(found, ResolvedBackend):
            return _build(found)
        if found.permanent:
            return NoBuild(found.reason)
        raise Unavailable(found.reason)

    async def manifest(self, request: BackendRequest, kind: MachineKind) -> Manifest | None:
        if self._bundled is not None and (bundled := self._bundled.find_build(request, kind)) is not None:
            return bundled.manifest
        entry = await self._resolver_for(request).choose(_query(request), _machine(kind))
        return None if entry is None else entry.manifest

    async def available(self, kinds: Collection[tuple[str, str]]) -> Sequence[dict[str, Any]]:
        """Without a kind of machine: all entries."""
        catalogue = await self._resolver.library.catalogue()
        wanted = {(capability or DEFAULT, platform) for capability, platform in kinds} or {(DISABLED, "")}
        listed = [_shown(entry) for entry in catalogue.search(capabilities=wanted)]
        names = {entry["name"] for entry in listed}
        bundled = self._bundled.list_entries() if self._bundled is not None else ()
        return [*listed, *(entry for entry in bundled if entry["name"] not in names)]

    async def upgrades(self, inventories: Sequence[NodeInventory]) -> dict[str, UpgradeInfo]:
        nodes = [
            rules.NodeInventory(
                row.node_id,
                row.node_name,
                _machine(MachineKind(row.capability, row.platform, row.python)),
                row.backends,
            )
            for row in inventories
        ]
        found: dict[str, UpgradeInfo] = {}
        if (bundled := self._bundled) is not None:
            nodes, found = split_bundled(
                nodes,
                lambda name, machine: bundled.find_variant(
                    name, MachineKind(machine.capability, machine.platform, machine.python)
                ),
            )
        if not any(row.backends for row in nodes):
            return found
        catalogue = await self._resolver.library.catalogue()
        digests = await self._resolver.available(rules.digests_to_look_up(nodes, catalogue))
        return rules.upgrades(nodes, catalogue, digests) | found

    async def aliases(self, builds: Collection[str]) -> Mapping[str, str]:
        if not builds:
            return {}
        catalogue = await self._resolver.library.catalogue()
        found = {name: catalogue.find(name) for name in builds}
        listed = {name: entry.alias for name, entry in found.items() if isinstance(entry, BackendEntry) and entry.alias}
        return {**(self._bundled.aliases(builds) if self._bundled is not None else {}), **listed}

    async def refresh(self) -> None:
        self._others.clear()
        self._resolver.invalidate()

    def forget_sources(self) -> None:
        for resolver in (self._resolver, *self._others.values()):
            resolver.invalidate()

    def galleries(self) -> Sequence[dict[str, Any]]:
        """Without the built-in gallery, which only Corral can read."""
        return [msgspec.to_builtins(gallery) for gallery in self._resolver.library.galleries if gallery != BUILT_IN]

    async def galleries_with(self, request: BackendRequest) -> Sequence[dict[str, Any]]:
        has, unread = await self._peer_galleries(request, self._resolver_for(request))
        return [msgspec.to_builtins(gallery) for gallery in ([has] if has is not None else unread)]

    async def _resolve_for_peer(
        self, request: BackendRequest, resolver: Resolver, machine: Machine
    ) -> ResolvedBackend | Unresolved:
        """A LocalAI worker looks the entry up itself, in galleries that it can read: not in the built-in one."""
        has, unread = await self._peer_galleries(request, resolver)
        if has is not None:
            return await resolver.resolve(f"{has.name}@{request.backend}", machine)
        reason = NO_GALLERY_FOR_LOCALAI
        if unread:
            why = resolver.library.unread()
            reason += "".join(
                f"; the gallery {each.name} could not be read ({why.get(each.name, '')})" for each in unread
            )
        return Unresolved(reason, permanent=not unread)

    async def _peer_galleries(
        self, request: BackendRequest, resolver: Resolver
    ) -> tuple[Gallery | None, list[Gallery]]:
        """The first gallery that has the entry, and those that could not be read. An entry's own name wins over an
        alias in an earlier gallery, as everywhere."""
        by_alias: Gallery | None = None
        unread: list[Gallery] = []
        for gallery in resolver.library.galleries:
            if gallery == BUILT_IN or (request.gallery and request.gallery.lower() != gallery.name.lower()):
                continue
            catalogue = await resolver.library.catalogue(gallery.name)
            if catalogue.unread:
                unread.append(gallery)
                continue
            match catalogue.find(request.backend):
                case BackendEntry():
                    return gallery, unread
                case AliasGroup():
                    by_alias = by_alias or gallery
                case UnknownBackend():
                    pass
        return by_alias, unread

    def unread(self) -> Mapping[str, str]:
        """Galleries that could not be read the last time, and why."""
        return self._resolver.library.unread()

    @property
    def library(self) -> BackendLibrary:
        return self._resolver.library

    def _resolver_for(self, request: BackendRequest) -> Resolver:
        try:
            brought = parse_galleries(request.galleries)
        except Invalid as error:
            log.warning("galleries of a request are ignored", error=error.message)  # as LocalAI does
            brought = ()
        if not brought:
            return self._resolver
        found = self._others.get(brought) or self._reading(brought)
        self._others[brought] = found
        self._others.move_to_end(brought)
        while len(self._others) > MAX_REQUEST_RESOLVERS:
            self._others.popitem(last=False)
        return found


@asynccontextmanager
async def open_galleries(
    options: GalleryOptions,
    registries: RegistrySettings,
    *,
    clock: Clock,
    env: Mapping[str, str],
    bundled: BundledBuilds | None = None,
) -> AsyncIterator[Galleries]:
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=options.connect_s, sock_read=options.silence_s)
    async with aiohttp.ClientSession(timeout=timeout, trust_env=True, cookie_jar=aiohttp.DummyCookieJar()) as session:
        registry: Registry = RegistryClient(session, credentials=DockerConfig(env), settings=registries, clock=clock)

        def reading(galleries: tuple[Gallery, ...]) -> Resolver:
            return make_resolver(session, replace(options, galleries=galleries), registry, clock=clock, env=env)

        yield Galleries(reading(tuple(options.galleries)), reading, bundled)


def gallery_folder(data: Path, chosen: Path | None) -> Path:
    """The folder that galleries with file URLs must be in."""
    return (chosen or data / "galleries").expanduser()


def _query(request: BackendRequest) -> str:
    return f"{request.gallery}@{request.backend}" if request.gallery else request.backend


def _machine(kind: MachineKind) -> Machine:
    return Machine(kind.capability or DEFAULT, kind.platform, kind.python)


def _build(found: ResolvedBackend) -> TargetBuild:
    return TargetBuild(
        variant=found.variant,
        digest=found.digest,
        version=found.version,
        alias=found.alias,
        gallery_url=found.gallery_url,
        sources=found.sources,
        manifest=found.manifest,
        size_bytes=found.size_bytes,
        note=found.note,
    )


def _not_found(unknown: UnknownBackend, gallery: str) -> NotFound | Unavailable:
    """If a gallery could not be read and no known name is similar, the backend may be in that gallery."""
    hopeful = unknown.unread and (gallery or not unknown.nearest)
    return Unavailable(unknown.reason) if hopeful else NotFound(unknown.reason)


def _shown(entry: BackendEntry) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "name": entry.name,
        "alias": entry.alias,
        "uri": entry.uri,
        "mirrors": list(entry.mirrors),
        "capabilities": dict(entry.capabilities),
        "version": entry.version,
        "description": entry.description,
        "license": entry.license,
        "icon": entry.icon,
        "urls": list(entry.urls),
        "tags": list(entry.tags),
        "size": entry.size,
    }
    kept = {key: value for key, value in fields.items() if value}
    gallery = {"name": entry.gallery.name, "url": entry.gallery.url}
    return kept | {"gallery": gallery, "id": entry.id, "is_meta": entry.is_meta}
