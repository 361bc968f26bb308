"""The interface of the backend galleries to the controller: list entries, resolve builds, find upgrades.

`galleries.py` implements it with `gallery/`. Every method may wait for the network, so none is called inside a
transaction.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

from corral.contract.manifest import Manifest
from corral.contract.messages.backends import NodeBackend, UpgradeInfo
from corral.controller.backends.plan import NoBuild
from corral.store.records import BackendRequest, TargetBuild


@dataclass(frozen=True)
class CatalogueEntry:
    """An entry that can be installed."""

    name: str  # the name it is installed by, without a gallery prefix
    hardware_specific: bool = False  # a build for one kind of machine
    meta_alternative: str = ""  # the entry that chooses among such builds
    request: BackendRequest | None = None  # the request in its normal form


class MachineKind(NamedTuple):
    """The properties of a node that decide which build fits. Many nodes share one kind and so one build."""

    capability: str
    platform: str = ""  # os/arch; empty: the node does not report it
    python: str = ""  # version of the interpreter that runs wheels, such as 3.11; empty: the controller's


@dataclass(frozen=True)
class NodeInventory:
    """The backends of one node, for the upgrade check."""

    node_id: str
    node_name: str
    capability: str
    platform: str
    backends: tuple[NodeBackend, ...]
    python: str = ""


class BundledBuilds(Protocol):
    """Builds of loaded bundles: they are used before any gallery or registry is asked."""

    def find_entry(self, request: BackendRequest, /) -> CatalogueEntry | None: ...

    def list_entries(self) -> Sequence[dict[str, Any]]:
        """The backends of bundles, in LocalAI's form."""

    def find_build(self, request: BackendRequest, kind: MachineKind, /) -> TargetBuild | None: ...

    def find_variant(self, name: str, kind: MachineKind, /) -> TargetBuild | None:
        """The build of that name, if it is the one for such a machine."""

    def why_no_build(self, request: BackendRequest, kind: MachineKind, /) -> str:
        """Why a bundle that has this backend has none for such a machine; empty if no bundle has the backend."""

    def aliases(self, builds: Collection[str], /) -> Mapping[str, str]:
        """By build, its alias."""


@runtime_checkable  # the web framework checks the types of injected parameters
class Catalogue(Protocol):
    async def look_up(self, request: BackendRequest) -> CatalogueEntry:
        """Raises NotFound with similar names, Invalid for an impossible request, Unavailable if no gallery can be
        read."""

    async def resolve(self, request: BackendRequest, kind: MachineKind, /) -> TargetBuild | NoBuild:
        """The build for such a machine. Raises Unreachable, Failed or Unavailable if it cannot be resolved now."""

    async def manifest(self, request: BackendRequest, kind: MachineKind, /) -> Manifest | None:
        """The manifest of the build for such a machine, from the galleries alone. None: they have none."""

    async def available(self, kinds: Collection[tuple[str, str]]) -> Sequence[dict[str, Any]]:
        """Entries in LocalAI's form (docs/reference/wire/gallery.md#backend-entry), that a machine of one of these
        kinds can use."""

    async def upgrades(self, inventories: Sequence[NodeInventory]) -> dict[str, UpgradeInfo]:
        """By backend: the newer versions in the galleries."""

    async def aliases(self, builds: Collection[str], /) -> Mapping[str, str]:
        """By build, its alias. Builds that no gallery lists are absent; never raises."""

    async def refresh(self) -> None:
        """Read the galleries and the registries again."""

    def forget_sources(self) -> None:
        """Forget the cached builds of galleries and registries: the next request needs current ones."""

    def galleries(self) -> Sequence[dict[str, Any]]:
        """Name, url and mirrors of each, without the built-in gallery."""

    async def galleries_with(self, request: BackendRequest, /) -> Sequence[dict[str, Any]]:
        """The gallery in which a LocalAI worker finds this entry, as it is sent to the worker. Never raises. If no
        gallery is known to have the entry: the galleries that could not be read."""
