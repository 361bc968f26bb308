"""A bundle: one archive with everything that a fleet without internet access needs to install backends and models.

The archive holds the manifest and blobs by digest (docs/reference/bundles.md). The CLI writes and reads archives, the
controller makes manifests and serves what it was given. Pure.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import msgspec

from corral.contract.codec import Message, Undecodable, always, decode
from corral.contract.manifest import Manifest
from corral.contract.models import check_model_name
from corral.contract.sources import Source, is_digest
from corral.kit.errors import Invalid

FORMAT = 1
MAX_DOCUMENT_BYTES = 32 << 20
MAX_BLOBS = 100_000
MAX_BLOB_BYTES = 4 << 40


class BundledBlob(Message, frozen=True):
    digest: str = always(str)
    size_bytes: int = always(int)


class BundledBuild(Message, frozen=True):
    """One build of a backend, for one kind of machine."""

    capability: str = always(str)
    platform: str = always(str)  # os/arch
    python: str = ""  # that the wheels were chosen for; empty: any
    variant: str = always(str)
    digest: str = ""
    version: str = ""
    alias: str = ""
    gallery_url: str = ""
    source: Source = msgspec.field(default_factory=Source)
    manifest: Manifest | None = None
    size_bytes: int = 0
    note: str = ""
    content_digest: str = ""  # of the source's content, as inventories report it
    listed_digest: str = ""  # of the source
    blobs: tuple[str, ...] = always(tuple)  # digests, in the order of the source; a layer may be named twice

    @property
    def machine(self) -> str:
        """The kind of machine, for people."""
        return ", ".join(filter(None, (self.platform, self.capability, self.python and f"Python {self.python}")))


class BundledBackend(Message, frozen=True):
    name: str = always(str)  # by which it is installed
    gallery: str = ""  # when a gallery was named
    uri: str = ""  # when it is in no gallery
    alias: str = ""
    hardware_specific: bool = False
    builds: tuple[BundledBuild, ...] = always(tuple)


class BundledFile(Message, frozen=True):
    """A file of a model as the controller stores it; a path with a slash at its end is the list of a repository or
    archive."""

    path: str = always(str)
    uri: str = always(str)
    resolved: str = always(str)
    digest: str = always(str)
    size_bytes: int = always(int)


class BundledModel(Message, frozen=True):
    name: str = always(str)
    source: str = ""  # gallery@name, if it came from a gallery
    definition: dict[str, Any] = msgspec.field(default_factory=dict)
    files: tuple[BundledFile, ...] = always(tuple)


class BundledPackages(Message, frozen=True):
    """The wheels of Corral's dependencies for one kind of machine, for machines that join."""

    platform: str = always(str)
    python: str = always(str)
    own_sha256: str = always(str)  # of the wheel of Corral that they belong to
    source: Source = msgspec.field(default_factory=Source)


class BundleManifest(Message, frozen=True):
    format: int = always(int)
    corral: str = always(str)  # version of the controller that made it
    backends: tuple[BundledBackend, ...] = always(tuple)
    models: tuple[BundledModel, ...] = always(tuple)
    packages: tuple[BundledPackages, ...] = always(tuple)
    blobs: tuple[BundledBlob, ...] = always(tuple)  # each once, by digest

    @property
    def size_bytes(self) -> int:
        return sum(blob.size_bytes for blob in self.blobs)


class BundleMachine(Message, frozen=True):
    """A kind of machine to make a bundle for."""

    platform: str = always(str)
    capability: str = ""
    python: str = ""


class PlanBundle(Message, frozen=True):
    """`POST /api/bundle-plans`. None: everything that the fleet has."""

    backends: tuple[str, ...] | None = None
    models: tuple[str, ...] | None = None
    machines: tuple[BundleMachine, ...] | None = None
    packages: bool = True  # Corral itself, for machines that join


class BundlePlan(Message, frozen=True):
    """Ask again until it is ready; the controller fetches what it lacks meanwhile."""

    ready: bool = always(bool)
    document: str = ""  # the manifest, when it is ready: these very bytes have the digest
    digest: str = ""
    have_bytes: int = 0
    size_bytes: int = 0  # as far as it is known
    jobs: tuple[str, ...] = ()  # operations that fetch the files of models: watch them, then ask again
    problems: tuple[str, ...] = ()  # why there can be no bundle
    notes: tuple[str, ...] = ()  # what the bundle lacks


class LoadBundle(Message, frozen=True):
    """`POST /api/bundles`, after all blobs were uploaded."""

    document: str = always(str)


class BundleBackendView(Message, frozen=True):
    name: str = always(str)
    variant: str = always(str)
    version: str = ""
    machine: str = always(str)
    size_bytes: int = always(int)


class BundleModelView(Message, frozen=True):
    name: str = always(str)
    files: int = always(int)
    size_bytes: int = always(int)


class BundleView(Message, frozen=True):
    """A loaded bundle, or one in an archive."""

    digest: str = always(str)
    corral: str = always(str)
    size_bytes: int = always(int)
    backends: tuple[BundleBackendView, ...] = always(tuple)
    models: tuple[BundleModelView, ...] = always(tuple)
    packages: tuple[str, ...] = ()  # kinds of machines that get Corral from it
    loaded_at: str = ""  # RFC 3339


def write_manifest(manifest: BundleManifest) -> bytes:
    """The same bytes for the same content: the digest of a bundle tells whether two are equal."""
    return msgspec.json.encode(manifest, order="deterministic")


def digest_of_bundle(document: bytes) -> str:
    return f"sha256:{hashlib.sha256(document).hexdigest()}"


def read_manifest(document: bytes) -> BundleManifest:
    """Raises Invalid for a manifest that cannot be used, or that names a blob it does not list."""
    if len(document) > MAX_DOCUMENT_BYTES:
        raise Invalid(f"the manifest of the bundle has {len(document)} bytes; {MAX_DOCUMENT_BYTES} are allowed")
    try:
        manifest = decode(BundleManifest, document)
    except Undecodable as error:
        raise Invalid(f"the manifest of the bundle cannot be read: {error}") from error
    if manifest.format != FORMAT:
        raise Invalid(
            f"the bundle has format {manifest.format}, and this version of Corral reads format {FORMAT}: "
            "create it again with this version"
        )
    _check_blobs(manifest)
    _check_names(manifest)
    return manifest


def used_digests(manifest: BundleManifest) -> Iterable[str]:
    for backend in manifest.backends:
        for build in backend.builds:
            yield from build.blobs
    for model in manifest.models:
        yield from (file.digest for file in model.files)
    for packages in manifest.packages:
        yield from (f"sha256:{wheel.sha256}" for wheel in packages.source.wheels)


def view_of(manifest: BundleManifest, digest: str, loaded_at: str = "") -> BundleView:
    sizes = {blob.digest: blob.size_bytes for blob in manifest.blobs}
    builds = [(backend, build) for backend in manifest.backends for build in backend.builds]
    return BundleView(
        digest=digest,
        corral=manifest.corral,
        size_bytes=manifest.size_bytes,
        backends=tuple(
            BundleBackendView(
                backend.name,
                build.variant,
                build.version,
                build.machine,
                sum(sizes[blob] for blob in dict.fromkeys(build.blobs)),
            )
            for backend, build in builds
        ),
        models=tuple(
            BundleModelView(
                model.name,
                sum(1 for file in model.files if not file.path.endswith("/")),
                sum(file.size_bytes for file in model.files),
            )
            for model in manifest.models
        ),
        packages=tuple(f"{each.platform}, Python {each.python}" for each in manifest.packages),
        loaded_at=loaded_at,
    )


def _check_blobs(manifest: BundleManifest) -> None:
    if len(manifest.blobs) > MAX_BLOBS:
        raise Invalid(f"the bundle names {len(manifest.blobs)} blobs; {MAX_BLOBS} are allowed")
    for blob in manifest.blobs:
        if not is_digest(blob.digest) or not 0 < blob.size_bytes <= MAX_BLOB_BYTES:
            raise Invalid(f"the bundle names a blob {blob.digest[:80]!r} of {blob.size_bytes} bytes")
    listed = {blob.digest for blob in manifest.blobs}
    if len(listed) != len(manifest.blobs):
        raise Invalid("the bundle names a blob twice")
    used = set(used_digests(manifest))
    if used != listed:
        odd = sorted(used ^ listed)[0]
        raise Invalid(f"the manifest of the bundle contradicts itself about the blob {odd[:80]}")


def _check_names(manifest: BundleManifest) -> None:
    for model in manifest.models:
        if check_model_name(model.name) != model.definition.get("name"):
            raise Invalid(f"the bundle has a definition of {model.definition.get('name')!r} for {model.name!r}")
    if not all(backend.name for backend in manifest.backends):
        raise Invalid("the bundle has a backend without a name")
