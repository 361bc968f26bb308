"""Requests to the installer and their results."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from corral.contract.codec import Message, always, encode
from corral.contract.manifest import Manifest
from corral.contract.messages.backends import InstallBackend, UpgradeBackend
from corral.contract.sources import Source
from corral.kit.errors import Invalid
from corral.worker.installer.names import check_name


class InstallRequest(Message, frozen=True):
    """A resolved request for one build: its name and its sources are known."""

    name: str = always(str)  # of the build: the folder's name
    sources: tuple[Source, ...] = ()  # alternatives for the same content, best first
    requested_as: str = ""  # the meta that was resolved to this build; empty: the build itself was meant
    digest: str = ""  # what the inventory must show afterwards; empty: whatever the source has
    alias: str = ""
    version: str = ""
    gallery_url: str = ""
    manifest: Manifest | None = None
    force: bool = False  # fetch and unpack again even if it is there

    @property
    def key(self) -> bytes:
        """Equal requests share one run."""
        return encode(self)

    @property
    def names(self) -> frozenset[str]:
        return frozenset({self.name, self.requested_as, self.alias} - {""})


def request_of(order: InstallBackend | UpgradeBackend) -> InstallRequest:
    """The request of an order that a Corral controller has resolved. Raises Invalid for another order."""
    if not order.sources:
        raise Invalid(f"the order for {order.backend} names no source")
    name = order.variant or order.name or order.backend
    return InstallRequest(
        name=check_name(name),
        sources=order.sources,
        requested_as=check_name(order.backend) if order.backend not in ("", name) and not order.uri else "",
        digest=order.digest,
        alias=order.alias,
        version=order.version,
        gallery_url=order.gallery_url,
        manifest=order.manifest,
        force=isinstance(order, InstallBackend) and order.force,
    )


@dataclass(frozen=True)
class RemovedBackends:
    """The names that were removed."""

    names: tuple[str, ...]


@dataclass(frozen=True)
class InstallFolders:
    backends: Path
    system: Path | None = None  # read, never written
