"""Plans a new bundle: finds the builds for each kind of machine, and brings all blobs to this controller.

A plan is asked for again until it is ready. Every request renews the interest in the downloads; without it they stop.
Builds that rules already chose are used as they are, so that the bundle has what runs in this fleet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from corral import __version__
from corral.blobs.digests import PREFIX
from corral.blobs.eviction import note_request
from corral.blobs.store import Blob, BlobStore
from corral.blobs.upload import Uploads
from corral.contract.bundles import (
    FORMAT,
    BundledBackend,
    BundledBlob,
    BundledBuild,
    BundledModel,
    BundledPackages,
    BundleManifest,
    BundlePlan,
    PlanBundle,
    digest_of_bundle,
    write_manifest,
)
from corral.contract.hardware import DEFAULT
from corral.contract.models import Definition
from corral.contract.sources import INLINE, PYPI, Source, public_source
from corral.controller.artifacts.fetches import ArtifactFetches, SourceState
from corral.controller.artifacts.listings import KINDS, listing_key
from corral.controller.backends.catalogue import Catalogue, CatalogueEntry, MachineKind
from corral.controller.backends.plan import NoBuild
from corral.controller.backends.world import kinds_of
from corral.controller.bundles.library import Bundles
from corral.controller.bundles.model_files import BundledModels, PlanProgress
from corral.controller.distribution.packages import CorralPackages, packages_source
from corral.controller.inventory.nodes import takes_backends
from corral.controller.models.views import definition_of
from corral.kit.errors import CorralError, Failed, Invalid, NotFound
from corral.kit.redact import remove_logins
from corral.store.engine.transactions import Store
from corral.store.records import BackendRequest, BackendRule, BackendTarget, TargetBuild, Want
from corral.store.tables import backend_rules, backend_targets, models, nodes

WHO = "bundle"  # in place of a node that is interested in an artifact
_PLATFORMS = frozenset({"linux/amd64", "linux/arm64", "darwin/arm64", "darwin/amd64"})


@dataclass(frozen=True)
class _Chosen:
    """A build for one kind of machine, and the target it belongs to."""

    build: TargetBuild
    target: str


@dataclass(frozen=True)
class _World:
    kinds: tuple[MachineKind, ...]
    definitions: dict[str, Definition]
    sources: dict[str, str]  # of models
    rules: tuple[BackendRule, ...]
    targets: dict[str, list[BackendTarget]] = field(default_factory=dict)


class BundleMaker:
    def __init__(
        self,
        store: Store,
        catalogue: Catalogue,
        fetches: ArtifactFetches,
        artifacts: BlobStore,
        models: BundledModels,
        packages: CorralPackages,
    ) -> None:
        self._store = store
        self._catalogue = catalogue
        self._fetches = fetches
        self._artifacts = artifacts
        self._models = models
        self._packages = packages

    async def plan(self, request: PlanBundle, *, by: str = "") -> BundlePlan:
        """Raises NotFound for an unknown model or backend, Invalid if there is nothing to put into a bundle."""
        world = await self._read(request)
        progress = PlanProgress()
        definitions = _wanted_models(request, world)
        found_models = [await self._models.add(each, world.sources, progress, by=by) for each in definitions]
        backends = [
            found
            for name in _wanted_backends(request, world)
            if (found := await self._add_backend(name, world, progress)) is not None
        ]
        packages = await self._add_packages(world.kinds, progress) if request.packages else []
        if not backends and not found_models and not progress.problems:
            raise Invalid("the fleet has no backends and no models yet: install some, or name them")
        return _finished(backends, found_models, packages, progress)

    async def _read(self, request: PlanBundle) -> _World:
        async with self._store.read() as tx:
            outlines = [each for each in await nodes.list_outlines(tx) if takes_backends(each)]
            defined = await models.list_(tx)
            rules = [rule for rule in await backend_rules.list_live(tx) if rule.want != Want.ABSENT and rule.target]
            rows = await backend_targets.list_for(tx, sorted({rule.target for rule in rules}))
        targets: dict[str, list[BackendTarget]] = {}
        for row in rows:
            targets.setdefault(row.id, []).append(row)
        kinds = {kind for kind in kinds_of(outlines) if kind.platform}
        if request.machines is not None:
            kinds = {MachineKind(each.capability or DEFAULT, each.platform, each.python) for each in request.machines}
        if bad := sorted({kind.platform for kind in kinds} - _PLATFORMS):
            raise Invalid(f"{bad[0]!r} is no platform of a machine: {', '.join(sorted(_PLATFORMS))} are")
        if not kinds:
            raise Invalid("no node has joined yet: say for which machines with --machine linux/amd64,default,3.12")
        return _World(
            tuple(sorted(kinds)),
            {row.id: found for row in defined if (found := definition_of(row)) is not None},
            {row.id: row.source for row in defined},
            tuple(rules),
            targets,
        )

    async def _add_backend(self, name: str, world: _World, progress: PlanProgress) -> BundledBackend | None:
        """The newest live rule decides; without one the galleries do."""
        rule = next((rule for rule in reversed(world.rules) if rule.backend == name), None)
        request = rule.request if rule is not None else _request_of(name)
        try:
            entry = CatalogueEntry(request.backend) if request.uri else await self._catalogue.look_up(request)
        except CorralError as error:
            progress.problems.append(error.message)
            return None
        builds = []
        for kind in world.kinds:
            chosen = await self._choose(entry.request or request, rule, kind, world, progress)
            if chosen is not None and (found := await self._add_build(name, kind, chosen, progress)) is not None:
                builds.append(found)
        if not builds:
            return None
        return BundledBackend(
            name=entry.name,
            gallery=(entry.request or request).gallery,
            uri=remove_logins(request.uri),
            alias=request.alias or builds[0].alias,
            hardware_specific=entry.hardware_specific,
            builds=tuple(builds),
        )

    async def _choose(
        self,
        request: BackendRequest,
        rule: BackendRule | None,
        kind: MachineKind,
        world: _World,
        progress: PlanProgress,
    ) -> _Chosen | None:
        for row in world.targets.get(rule.target, ()) if rule is not None else ():
            if MachineKind(row.capability, row.platform, row.python) == kind and row.build is not None:
                return _Chosen(row.build, row.id)
        try:
            found = await self._catalogue.resolve(request, kind)
        except CorralError as error:
            progress.problems.append(f"{request.backend} for {_shown(kind)}: {error.message}")
            return None
        if isinstance(found, NoBuild):
            progress.notes.append(f"{request.backend} is not in the bundle for {_shown(kind)}: {found.reason}")
            return None
        return _Chosen(found, WHO)

    async def _add_build(
        self, name: str, kind: MachineKind, chosen: _Chosen, progress: PlanProgress
    ) -> BundledBuild | None:
        """Its first source that can be fetched. None while that is not known, and where there is none."""
        build, reasons = chosen.build, []
        for source in build.sources:
            if source.kind == INLINE:
                return _bundled(build, kind, source, None)
            if source.kind not in KINDS:
                reasons.append(f"{source.uri[:200]} lies on the disk of each worker")
                continue
            state = self._fetches.want(
                listing_key(source, kind.platform, chosen.target), source, kind.platform, f"{WHO} {name}"
            )
            if not state.has_failed:
                return self._collect(build, kind, source, state, progress)
            reasons += [state.error, *state.blob_errors.values()]
        why = "; ".join(filter(None, reasons)) or "it has no source"
        progress.problems.append(f"{name} for {_shown(kind)}: {why}")
        return None

    def _collect(
        self, build: TargetBuild, kind: MachineKind, source: Source, state: SourceState, progress: PlanProgress
    ) -> BundledBuild | None:
        if state.listing is None:
            progress.wait()
            return None
        for blob in state.listing.blobs:
            self._add_blob(blob.digest, blob.size_bytes, progress)
        return _bundled(build, kind, source, state)

    async def _add_packages(self, kinds: Sequence[MachineKind], progress: PlanProgress) -> list[BundledPackages]:
        """Corral itself. Without it a bundle is still of use."""
        found = []
        for platform, python in sorted({(kind.platform, kind.python) for kind in kinds if kind.python}):
            try:
                added = await self._add_packages_for(platform, python, progress)
            except CorralError as error:
                progress.notes.append(f"Corral for machines that join is not in the bundle: {error.message}")
                continue
            if added is not None:
                found.append(added)
        return found

    async def _add_packages_for(self, platform: str, python: str, progress: PlanProgress) -> BundledPackages | None:
        """None while its list is being made."""
        wheels, own = await self._packages.list_(platform, python, WHO), await self._packages.own()
        if wheels is None:
            progress.wait()
            return None
        source = packages_source(platform, python, wheels)
        state = self._fetches.want(listing_key(source, platform, own.sha256), source, platform, f"install {WHO}")
        if state.has_failed:
            raise Failed("; ".join(filter(None, (state.error, *state.blob_errors.values()))))
        for wheel in wheels:
            self._add_blob(PREFIX + wheel.sha256, wheel.size, progress)
        return BundledPackages(platform, python, own.sha256, public_source(source))

    def _add_blob(self, digest: str, size_bytes: int, progress: PlanProgress) -> None:
        if (stored := self._artifacts.find(digest)) is not None:
            progress.add(digest, stored.size, stored.size, is_stored=True)
            return
        incoming = self._artifacts.find_incoming(digest)
        progress.add(digest, size_bytes, incoming.have if incoming is not None else 0, is_stored=False)


def _wanted_models(request: PlanBundle, world: _World) -> list[Definition]:
    """With the models that aliases stand for; none if only backends are named. Raises NotFound."""
    everything = () if request.backends is not None else tuple(world.definitions)
    waiting = list(everything if request.models is None else request.models)
    found: dict[str, Definition] = {}
    while waiting:
        name = waiting.pop()
        definition = world.definitions.get(name)
        if definition is None:
            raise NotFound(f"this fleet has no model {name!r}: install it first with `corral models install {name}`")
        if name not in found and definition.alias:
            waiting.append(definition.alias)
        found[name] = definition
    return [found[name] for name in sorted(found)]


def _wanted_backends(request: PlanBundle, world: _World) -> list[str]:
    """Those that were named, or all with a rule; and those of the models."""
    everything = () if request.models is not None else tuple(rule.backend for rule in world.rules)
    named = everything if request.backends is None else request.backends
    return sorted({*named, *(each.backend for each in _wanted_models(request, world) if each.backend)})


def _request_of(name: str) -> BackendRequest:
    gallery, at, rest = name.partition("@")
    return BackendRequest(rest, gallery=gallery) if at else BackendRequest(name)


def _bundled(build: TargetBuild, kind: MachineKind, source: Source, state: SourceState | None) -> BundledBuild:
    listing = state.listing if state is not None else None
    return BundledBuild(
        capability=kind.capability,
        platform=kind.platform,
        python=kind.python if source.kind == PYPI else "",
        variant=build.variant,
        digest=build.digest,
        version=build.version,
        alias=build.alias,
        gallery_url=build.gallery_url,
        source=public_source(source),
        manifest=build.manifest,
        size_bytes=build.size_bytes,
        note=build.note,
        content_digest=listing.content_digest if listing is not None else "",
        listed_digest=listing.digest if listing is not None else "",
        blobs=tuple(blob.digest for blob in listing.blobs) if listing is not None else (),
    )


def _finished(
    backends: Sequence[BundledBackend],
    found_models: Sequence[BundledModel],
    packages: Sequence[BundledPackages],
    progress: PlanProgress,
) -> BundlePlan:
    plan = BundlePlan(
        ready=False,
        have_bytes=progress.have_bytes,
        size_bytes=progress.size_bytes,
        jobs=tuple(progress.jobs),
        problems=tuple(dict.fromkeys(progress.problems)),
        notes=tuple(dict.fromkeys(progress.notes)),
    )
    if not progress.is_ready:
        return plan
    manifest = BundleManifest(
        FORMAT,
        __version__,
        tuple(backends),
        tuple(found_models),
        tuple(packages),
        tuple(BundledBlob(digest, size) for digest, size in sorted(progress.blobs.items())),
    )
    # A bundle leaves the fleet: users and passwords of URLs do not. The digest is that of the text without them.
    document = remove_logins(write_manifest(manifest).decode())
    return BundlePlan(
        ready=True,
        document=document,
        digest=digest_of_bundle(document.encode()),
        have_bytes=progress.have_bytes,
        size_bytes=progress.size_bytes,
        notes=plan.notes,
    )


def _shown(kind: MachineKind) -> str:
    return ", ".join(filter(None, (kind.platform, kind.capability, kind.python and f"Python {kind.python}")))


@dataclass(frozen=True)
class BundleService:
    """What the API needs of bundles."""

    loaded: Bundles
    maker: BundleMaker
    uploads: Uploads
    stores: Sequence[BlobStore]  # that planned bundles take their blobs from

    def find_blob(self, digest: str) -> Blob | None:
        """A blob for a new bundle; it counts as requested now, so that it is not removed at once."""
        for store in self.stores:
            blob = store.find(digest)
            if blob is not None and note_request(blob):
                return blob
        return None
