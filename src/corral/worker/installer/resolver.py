"""Resolves an order that names no source to exactly one build, in the galleries and for this machine
(docs/reference/wire/backends.md#install). Orders of LocalAI controllers never name a source; a Corral controller has
usually resolved the build itself, and its orders do not come here."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace

import msgspec

from corral.contract.messages.backends import InstallBackend, UpgradeBackend
from corral.contract.sources import Registry, parse_uri
from corral.gallery.backends.factory import GalleryOptions, open_resolver
from corral.gallery.backends.resolution import Machine, ResolvedBackend, Unresolved
from corral.gallery.backends.resolver import Resolver
from corral.gallery.galleries import Gallery, parse_galleries
from corral.kit.clock import Clock
from corral.kit.errors import Failed, Invalid
from corral.kit.humanize import format_suggestions
from corral.worker.installer.names import check_name
from corral.worker.installer.requests import InstallRequest

Order = InstallBackend | UpgradeBackend
MAX_OPEN_RESOLVERS = 8


class NotResolved(Failed):
    """No build fits. `permanent`: waiting does not change that."""

    code = "not_resolved"

    def __init__(self, refused: Unresolved) -> None:
        hint = format_suggestions(refused.nearest)
        super().__init__(f"{refused.reason}{hint}")
        self.permanent = refused.permanent


class BackendResolver:
    """`async with`. Each list of galleries is opened once and kept open, with its index."""

    def __init__(
        self,
        options: GalleryOptions,
        registry: Registry,
        machine: Callable[[], Machine],
        *,
        clock: Clock,
        env: Mapping[str, str],
    ) -> None:
        """`options` are this worker's own; `machine` describes the machine as it is now."""
        self._options = options
        self._registry = registry
        self._machine = machine
        self._clock = clock
        self._env = env
        self._open: dict[tuple[str, bool], Resolver] = {}
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> BackendResolver:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._open.clear()
        await self._stack.aclose()

    async def request_for(self, order: Order, *, built_in: bool) -> InstallRequest:
        """`built_in` False: the order comes from a LocalAI controller, whose names mean LocalAI's builds. Raises
        Invalid, NotResolved."""
        async with self._resolver(order.backend_galleries, built_in) as resolver:
            if isinstance(order, UpgradeBackend) or order.force:
                resolver.invalidate()  # the order implies that the galleries have something newer
            found = await self._look_up(resolver, order)
        if isinstance(found, Unresolved):
            raise NotResolved(found)
        return _request(order, found)

    async def _look_up(self, resolver: Resolver, order: Order) -> ResolvedBackend | Unresolved:
        machine = self._machine()
        if not order.uri:
            return await resolver.resolve(order.backend, machine)
        try:
            parse_uri(order.uri)
        except Invalid:
            # LocalAI reads a text that is not a URI as the name of a gallery entry
            # (docs/reference/wire/gallery.md#direct-installs).
            if "/" in order.uri or ":" in order.uri:
                raise
            if order.name or order.alias:
                raise Invalid(f"{order.uri!r} is in a gallery, where it has its own name and alias") from None
            return await resolver.resolve(order.uri, machine)
        return await resolver.resolve_uri(order.uri, machine, name=order.name or order.backend, alias=order.alias)

    @contextlib.asynccontextmanager
    async def _resolver(self, galleries: str, built_in: bool) -> AsyncIterator[Resolver]:
        key = (galleries, built_in)
        if (known := self._open.get(key)) is not None:
            yield known
            return
        opening = open_resolver(
            replace(self._options, galleries=self._galleries(galleries), built_in=built_in),
            self._registry,
            clock=self._clock,
            env=self._env,
        )
        if len(self._open) < MAX_OPEN_RESOLVERS:
            resolver = await self._stack.enter_async_context(opening)
            yield self._open.setdefault(key, resolver)
        else:
            async with opening as resolver:
                yield resolver

    def _galleries(self, galleries: str) -> Sequence[Gallery]:
        """A list in the order replaces the worker's own."""
        return parse_galleries(galleries) or self._options.galleries


def _request(order: Order, found: ResolvedBackend) -> InstallRequest:
    requested_as = order.backend if order.backend not in ("", found.variant) else ""
    request = InstallRequest(
        name=check_name(found.variant),
        sources=found.sources,
        requested_as=check_name(requested_as) if requested_as else "",
        digest=found.digest,
        alias=order.alias or found.alias,
        version=found.version,
        gallery_url=found.gallery_url,
        manifest=found.manifest,
        force=isinstance(order, InstallBackend) and order.force,
    )
    return request if not order.digest else msgspec.structs.replace(request, digest=order.digest)
