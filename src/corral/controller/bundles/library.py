"""The loaded bundles of this controller: what they hold is found here before any server is asked.

    <blobs>/bundles/sha256/<hex>       the blobs, which other stores of this controller link
    <blobs>/bundles/manifests/<hex>    the manifest of each loaded bundle, named by its SHA-256

A bundle counts once its manifest is stored, after all of its blobs. The one that was loaded last wins.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from corral.blobs.digests import PREFIX, hex_of
from corral.blobs.store import BlobStore
from corral.contract.bundles import (
    BundledBackend,
    BundledBuild,
    BundledFile,
    BundledModel,
    BundleManifest,
    BundleView,
    digest_of_bundle,
    read_manifest,
    view_of,
)
from corral.contract.sources import Source, Wheel, public_source
from corral.controller.artifacts.listings import ArtifactListing, ListedBlob
from corral.controller.backends.catalogue import CatalogueEntry, MachineKind
from corral.controller.bundles.match import GALLERY, choose_build, is_backend, why_no_build
from corral.gallery.galleries import Gallery
from corral.gallery.models.entries import ModelEntry
from corral.kit.clock import Clock
from corral.kit.errors import Invalid, NotFound
from corral.kit.files import write_atomically
from corral.kit.log import get_log
from corral.kit.tasks import run_every
from corral.kit.threads import run_uncancelled
from corral.store.records import BackendRequest, TargetBuild

log = get_log(__name__)

KEEP_UNUSED_S = 24 * 3600.0  # blobs of no bundle: its upload was given up
SWEEP_EVERY_S = 600.0


@dataclass(frozen=True)
class LoadedBundle:
    digest: str
    manifest: BundleManifest
    loaded_at: float  # seconds since the epoch

    @property
    def view(self) -> BundleView:
        at = datetime.fromtimestamp(self.loaded_at, UTC).isoformat(timespec="seconds")
        return view_of(self.manifest, self.digest, at)


class Bundles:
    name = "bundles"

    def __init__(self, folder: Path, clock: Clock) -> None:
        """Blocking: reads the manifests."""
        self.blobs = BlobStore(folder)
        self._folder = folder / "manifests"
        self._folder.mkdir(exist_ok=True, mode=0o700)
        self._clock = clock
        self._changing = asyncio.Lock()
        self._loaded = self._read_all()

    # What is loaded

    def list_(self) -> list[LoadedBundle]:
        """The one that was loaded last comes first."""
        return list(self._loaded)

    async def load(self, document: bytes) -> LoadedBundle:
        """Raises Invalid for a bad manifest or a blob of another size, NotFound if a blob was not uploaded."""
        manifest = read_manifest(document)
        digest = digest_of_bundle(document)
        async with self._changing:
            with self.blobs.hold(*(blob.digest for blob in manifest.blobs)):
                await run_uncancelled(self._check_blobs, manifest)
                await run_uncancelled(self._store, digest, document)
            loaded = LoadedBundle(digest, manifest, time.time())
            self._loaded = [loaded, *(each for each in self._loaded if each.digest != digest)]
        log.info("bundle loaded", digest=digest, blobs=len(manifest.blobs), bytes=manifest.size_bytes)
        return loaded

    async def remove(self, digest: str) -> LoadedBundle:
        """Backends that are installed and models that are fetched stay. `digest` may be shortened. Raises NotFound."""
        async with self._changing:
            found = self._find(digest)
            await run_uncancelled((self._folder / hex_of(found.digest)).unlink, True)
            self._loaded = [each for each in self._loaded if each is not found]
            mine = {blob.digest for blob in found.manifest.blobs}
            self.blobs.discard(*(mine - self._digests()))
        log.info("bundle removed", digest=found.digest)
        return found

    async def run(self) -> None:
        await run_every(self.name, SWEEP_EVERY_S, self.sweep, clock=self._clock)

    async def sweep(self) -> None:
        async with self._changing:
            await self.blobs.sweep(older_than_s=KEEP_UNUSED_S, keep=self._digests())

    # What others ask for

    def find_entry(self, request: BackendRequest) -> CatalogueEntry | None:
        backend = next(self._backends(request), None)
        if backend is None:
            return None
        return CatalogueEntry(
            backend.name, hardware_specific=backend.hardware_specific, request=_in_normal_form(request, backend)
        )

    def list_entries(self) -> list[dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        for loaded in self._loaded:
            for backend in loaded.manifest.backends:
                found.setdefault(backend.name, _shown(backend, loaded.digest))
        return list(found.values())

    def find_build(self, request: BackendRequest, kind: MachineKind) -> TargetBuild | None:
        for backend in self._backends(request):
            if (build := choose_build(backend.builds, kind)) is not None:
                return _target(build)
        return None

    def find_variant(self, name: str, kind: MachineKind) -> TargetBuild | None:
        for loaded in self._loaded:
            for backend in loaded.manifest.backends:
                build = choose_build(backend.builds, kind)
                if build is not None and build.variant == name:
                    return _target(build)
        return None

    def why_no_build(self, request: BackendRequest, kind: MachineKind) -> str:
        """Why a bundle that has this backend has none for such a machine; empty if no bundle has the backend."""
        builds = [build for backend in self._backends(request) for build in backend.builds]
        return why_no_build(request.backend, builds, kind) if builds else ""

    def aliases(self, builds: Collection[str]) -> dict[str, str]:
        return {build.variant: build.alias for build in self._builds() if build.alias and build.variant in builds}

    def find_listing(self, source: Source, platform: str) -> ArtifactListing | None:
        """The blobs of a source of a bundled build."""
        public = public_source(source)
        for build in self._builds():
            own = build.source
            if (own.kind, own.uri, own.digest, own.wheels) != (public.kind, public.uri, public.digest, public.wheels):
                continue
            if build.platform == (source.platform or platform) and build.blobs:
                return ArtifactListing(
                    build.listed_digest, build.content_digest, tuple(ListedBlob(each) for each in build.blobs)
                )
        return None

    def list_models(self) -> list[ModelEntry]:
        found: dict[str, ModelEntry] = {}
        for loaded in self._loaded:
            for model in loaded.manifest.models:
                found.setdefault(model.name, _entry(model, loaded.digest))
        return list(found.values())

    def find_model(self, query: str) -> ModelEntry | None:
        """By name, by `bundle@name`, or by the name that it had in its gallery."""
        wanted = query.strip().lower()
        for loaded in self._loaded:
            for model in loaded.manifest.models:
                if wanted in (model.name.lower(), f"{GALLERY}@{model.name}".lower(), model.source.lower()):
                    return _entry(model, loaded.digest)
        return None

    def list_files(self) -> list[tuple[BundledFile, ...]]:
        """The files of each bundled model."""
        return [model.files for loaded in self._loaded for model in loaded.manifest.models if model.files]

    def find_packages(self, own_sha256: str, platform: str, python: str) -> tuple[Wheel, ...]:
        """The wheels of Corral's dependencies; empty if no bundle has them."""
        for loaded in self._loaded:
            for each in loaded.manifest.packages:
                if (each.own_sha256, each.platform, each.python) == (own_sha256, platform, python):
                    return each.source.wheels
        return ()

    # Inside

    def _find(self, digest: str) -> LoadedBundle:
        wanted = digest.strip().lower().removeprefix(PREFIX)
        found = [each for each in self._loaded if wanted and hex_of(each.digest).startswith(wanted)]
        if len(found) > 1:
            raise Invalid(f"{len(found)} bundles begin with {wanted}: give more digits")
        if not found:
            raise NotFound(f"there is no bundle {digest[:80]}: `corral bundle list` shows those that are loaded")
        return found[0]

    def _backends(self, request: BackendRequest) -> Iterator[BundledBackend]:
        for loaded in self._loaded:
            yield from (backend for backend in loaded.manifest.backends if is_backend(backend, request))

    def _builds(self) -> Iterator[BundledBuild]:
        for loaded in self._loaded:
            for backend in loaded.manifest.backends:
                yield from backend.builds

    def _digests(self) -> set[str]:
        return {blob.digest for loaded in self._loaded for blob in loaded.manifest.blobs}

    def _check_blobs(self, manifest: BundleManifest) -> None:
        for blob in manifest.blobs:
            found = self.blobs.find(blob.digest)
            if found is None:
                raise NotFound(f"the blob {blob.digest} of the bundle was not uploaded: run the command again")
            if found.size != blob.size_bytes:
                raise Invalid(f"the bundle gives {blob.size_bytes} bytes for {blob.digest}; it has {found.size}")

    def _store(self, digest: str, document: bytes) -> None:
        path = self._folder / hex_of(digest)
        write_atomically(path, document)
        os.utime(path)

    def _read_all(self) -> list[LoadedBundle]:
        found = []
        for path in self._folder.iterdir():
            try:
                document = path.read_bytes()
                if digest_of_bundle(document) != PREFIX + path.name:
                    raise Invalid("its hash is wrong")
                found.append(LoadedBundle(PREFIX + path.name, read_manifest(document), path.stat().st_mtime))
            except (OSError, Invalid) as error:
                log.warning("a loaded bundle cannot be read and is ignored", manifest=path.name, reason=str(error))
        return sorted(found, key=lambda each: each.loaded_at, reverse=True)


def _in_normal_form(request: BackendRequest, backend: BundledBackend) -> BackendRequest:
    named = "" if request.gallery.lower() == GALLERY else request.gallery
    gallery = "" if request.uri else named or backend.gallery
    return msgspec.structs.replace(request, backend=backend.name, gallery=gallery)


def _shown(backend: BundledBackend, digest: str) -> dict[str, Any]:
    """As lists of galleries have it."""
    kept = {"alias": backend.alias, "uri": backend.uri, "version": backend.builds[0].version if backend.builds else ""}
    return {key: value for key, value in kept.items() if value} | {
        "name": backend.name,
        "description": "of a loaded bundle",
        "gallery": {"name": GALLERY, "url": f"{GALLERY}:{digest}"},
        "id": f"{GALLERY}@{backend.name}",
        "is_meta": False,
    }


def _target(build: BundledBuild) -> TargetBuild:
    return TargetBuild(
        variant=build.variant,
        digest=build.digest,
        version=build.version,
        alias=build.alias,
        gallery_url=build.gallery_url,
        sources=(build.source,),
        manifest=build.manifest,
        size_bytes=build.size_bytes,
        note=build.note,
    )


def _entry(model: BundledModel, digest: str) -> ModelEntry:
    definition = {key: value for key, value in model.definition.items() if key != "name"}
    description = definition.get("description")
    return ModelEntry(
        gallery=Gallery(GALLERY, f"{GALLERY}:{digest}"),
        name=model.name,
        description=description if isinstance(description, str) else "",
        config_file=definition,
    )
