"""Finds the current sources of a concrete build, with digests and sizes (docs/reference/wire/gallery.md#images).

Queries the registry and the locker, caches their answers for a short time, and queries once for any number of nodes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import msgspec

from corral.contract.sources import HTTP, INLINE, OCI, PYPI, ImageIndex, Registry, Source, Wheel, parse_uri
from corral.gallery.backends.entries import BUILTIN_SCHEME, DEVELOPMENT_SUFFIX, BackendEntry
from corral.gallery.backends.resolution import Machine
from corral.gallery.pypi.lock import Lock, WheelLocker, digest_of_files, digest_of_lock
from corral.kit.clock import Clock
from corral.kit.errors import CorralError, Denied, NotFound
from corral.kit.single_flight import SingleFlight

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LocatorOptions:
    fresh_s: float = 60.0  # how long an answer of the registry or the locker is cached
    release_tag: str = "latest-"
    branch_tag: str = "master-"
    development_suffix: str = DEVELOPMENT_SUFFIX
    prefer_development: bool = False
    require_integrity: bool = False  # refuse builds whose content cannot be verified
    own_python: str = ""  # the Python of machines that do not report theirs


OPTIONS = LocatorOptions()


@dataclass(frozen=True, slots=True)
class BuildLocation:
    sources: tuple[Source, ...]
    digest: str
    version: str = ""


class NotBuiltForPlatform(CorralError):
    """The source exists, but not for this platform. `platforms`: those it exists for, if known."""

    code = "not_built"

    def __init__(self, message: str, platforms: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.platforms = frozenset(platforms)


FillSizes = Callable[[Sequence[Wheel]], Awaitable[tuple[Wheel, ...]]]


class BuildLocator:
    def __init__(
        self,
        registry: Registry,
        locker: WheelLocker,
        *,
        clock: Clock,
        fill_sizes: FillSizes | None = None,
        options: LocatorOptions = OPTIONS,
    ) -> None:
        self._registry = registry
        self._locker = locker
        self._clock = clock
        self._fill_sizes = fill_sizes
        self._options = options
        self._lookups: SingleFlight[Hashable, None, Any] = SingleFlight()
        self._answers: dict[Hashable, tuple[float, Any]] = {}

    def invalidate(self) -> None:
        """The next call queries the registry and the locker again."""
        self._answers.clear()

    async def locate(self, entry: BackendEntry, machine: Machine) -> BuildLocation:
        """Raises NotBuiltForPlatform, NotFound (no such image, package or version), Denied (integrity), Unreachable,
        Failed."""
        if entry.uri.startswith(BUILTIN_SCHEME):
            digest = digest_of_files(entry.files)
            size = sum(len(file.text.encode()) for file in entry.files)
            return BuildLocation((Source(INLINE, entry.uri, digest, size, files=entry.files),), digest)
        source = parse_uri(entry.uri)
        check_integrity(entry, source, required=self._options.require_integrity)
        match source.kind:
            case kind if kind == OCI:
                located = await self._image(entry, machine.platform)
            case kind if kind == PYPI:
                located = await self._wheels(entry, source.uri, machine)
            case _:
                located = _download(entry, source)
        return replace(located, sources=tuple(_add_files(each, entry) for each in located.sources))

    async def _image(self, entry: BackendEntry, platform: str) -> BuildLocation:
        """The first reference that exists, followed by the others that serve the same content."""
        release, branch = image_candidates(entry, self._options)
        faults: list[CorralError] = []
        for references in (branch[:1], release, branch) if self._options.prefer_development else (release, branch):
            for reference in references:
                try:
                    index = await self._look_up(reference)
                except CorralError as error:
                    faults.append(error)
                    continue
                # A mirror has the same bytes under the same digest; the branch's image is another build.
                same = [each for each in release if each != reference] if reference in release else []
                return self._image_location([reference, *same], index, platform)
            if unanswered := [fault for fault in faults if not isinstance(fault, NotFound)]:
                # The release may still exist: a temporary error must not replace it by a development build.
                raise unanswered[0]
        raise faults[0]

    def _image_location(self, references: Sequence[str], index: ImageIndex, platform: str) -> BuildLocation:
        image = index.find(platform) if platform else None
        if platform and image is None:
            there = sorted({"/".join(each.platform.split("/")[:2]) for each in index.images})
            raise NotBuiltForPlatform(f"{references[0]} is built for {', '.join(there) or 'nothing'}", there)
        size = image.size if image is not None else 0
        sources = (Source(OCI, reference, index.digest, size, platform) for reference in references)
        return BuildLocation(tuple(sources), index.digest)

    async def _look_up(self, reference: str) -> ImageIndex:
        return await self._cached_lookup(("image", reference), lambda: self._registry.look_up(reference))

    async def _wheels(self, entry: BackendEntry, requirement: str, machine: Machine) -> BuildLocation:
        python = machine.python or self._options.own_python
        lock = await self._cached_lookup(
            ("wheels", requirement, machine.platform, python),
            lambda: self._lock(requirement, machine.platform, python),
        )
        digest = digest_of_lock(lock.wheels, entry.files)
        size = sum(wheel.size for wheel in lock.wheels)
        source = Source(PYPI, lock.requirement, digest, size, machine.platform, lock.wheels, lock.python)
        return BuildLocation((source,), digest, lock.version)

    async def _lock(self, requirement: str, platform: str, python: str) -> Lock:
        lock = await self._locker.lock(requirement, platform=platform, python=python)
        if self._fill_sizes is None:
            return lock
        return replace(lock, wheels=await self._fill_sizes(lock.wheels))

    async def _cached_lookup(self, key: Hashable, look_up: Callable[[], Awaitable[T]]) -> T:
        now = self._clock.monotonic()
        self._answers = {k: kept for k, kept in self._answers.items() if now - kept[0] < self._options.fresh_s}
        if key in self._answers:
            known: T = self._answers[key][1]
            return known
        answer: T = await self._lookups.run(key, lambda _: look_up())
        self._answers[key] = (self._clock.monotonic(), answer)
        return answer


def image_candidates(entry: BackendEntry, options: LocatorOptions) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """References of the release and its mirrors, and those of the branch's build."""
    primary = parse_uri(entry.uri).uri
    mirrors = (parse_uri(mirror, image=True) for mirror in entry.mirrors)
    release = tuple(dict.fromkeys((primary, *(mirror.uri for mirror in mirrors if mirror.kind == OCI))))
    branch = primary.replace(options.release_tag, options.branch_tag, 1)
    return release, (branch, f"{branch}-{options.development_suffix}") if branch != primary else ()


def check_integrity(entry: BackendEntry, source: Source, *, required: bool) -> None:
    """Raises Denied if the required verification is not possible
    (docs/reference/wire/gallery.md#verification)."""
    policy = entry.gallery.verification
    if source.kind == OCI and policy is not None and policy.requires_signature:
        raise Denied(f"the gallery {entry.gallery.name} requires signatures, which Corral cannot verify")
    if not required:
        return
    if source.kind == OCI:
        raise Denied(f"{entry.name} is an image without a required signature, but integrity is required")
    if source.kind == HTTP and not entry.sha256:
        raise Denied(f"{entry.name} has no sha256, but integrity is required")


def _download(entry: BackendEntry, source: Source) -> BuildLocation:
    digest = f"sha256:{entry.sha256}" if entry.sha256 else ""
    mirrors = (parse_uri(mirror) for mirror in entry.mirrors)
    # The hash of a file says nothing about an image.
    same = (source, *(mirror for mirror in mirrors if mirror.kind == source.kind))
    sources = tuple(msgspec.structs.replace(each, digest=digest) for each in same)
    return BuildLocation(sources, digest)


def _add_files(source: Source, entry: BackendEntry) -> Source:
    return msgspec.structs.replace(source, files=entry.files)
