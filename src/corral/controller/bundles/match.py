"""Which backend and build of a bundle a request means. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from corral.contract.bundles import BundledBackend, BundledBuild
from corral.contract.hardware import DEFAULT
from corral.controller.backends.catalogue import MachineKind
from corral.gallery.backends.compatibility import capability_chain
from corral.store.records import BackendRequest

GALLERY = "bundle"  # the name by which lists show what bundles have


def is_backend(backend: BundledBackend, request: BackendRequest) -> bool:
    """A request with galleries of its own means theirs."""
    if request.galleries:
        return False
    if request.uri or backend.uri:
        return request.uri == backend.uri
    gallery, at, name = request.backend.lower().partition("@")
    gallery, name = (gallery, name) if at else (request.gallery.lower(), gallery)
    if gallery not in ("", GALLERY, backend.gallery.lower()):
        return False
    return name in (backend.name.lower(), backend.alias.lower())


def choose_build(builds: Sequence[BundledBuild], kind: MachineKind) -> BundledBuild | None:
    """The build for the machine's own kind, else for a more general kind: nvidia for nvidia-cuda-12."""
    fitting = [build for build in builds if build.platform == kind.platform and _runs(build, kind)]
    for capability in capability_chain(kind.capability or DEFAULT, kind.platform):
        for build in fitting:
            if (build.capability or DEFAULT) == capability:
                return build
    return None


def why_no_build(backend: str, builds: Sequence[BundledBuild], kind: MachineKind) -> str:
    wanted = ", ".join(filter(None, (kind.platform, kind.capability, kind.python and f"Python {kind.python}")))
    had = "; ".join(sorted({build.machine for build in builds}))
    return (
        f"the loaded bundle has {backend} for {had}, and not for {wanted}: create the bundle with "
        f"--machine {kind.platform},{kind.capability or DEFAULT}{',' + kind.python if kind.python else ''}"
    )


def _runs(build: BundledBuild, kind: MachineKind) -> bool:
    return build.python in ("", kind.python)
