"""What the controller needs of the galleries: what exists, what it comes to on one kind of machine, what is newer.

`gallery/` knows all this; `main.py` hands in what fits the Protocol. Everything here may wait for the network, so
nothing of it is called inside a transaction.
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
    """Something that can be installed."""

    name: str  # under which it is installed, without a gallery in front
    hardware_specific: bool = False  # one build for one kind of machine: not for everybody
    meta_alternative: str = ""  # the entry that chooses among such builds
    request: BackendRequest | None = None  # the request in its normal form


class MachineKind(NamedTuple):
    """What choosing a build goes by. Many nodes are of one kind: what is found out for one holds for all."""

    capability: str
    platform: str = ""  # os/arch; empty: the node does not say
    python: str = ""  # 3.11, of the interpreter that will run wheels; empty: as ours


@dataclass(frozen=True)
class NodeInventory:
    """What one node has, for the upgrade check."""

    node_id: str
    node_name: str
    capability: str
    platform: str
    backends: tuple[NodeBackend, ...]
    python: str = ""


@runtime_checkable  # the doors' parameters are checked when they are handed out
class Catalogue(Protocol):
    async def look_up(self, request: BackendRequest) -> CatalogueEntry:
        """Raises NotFound naming what is near, Invalid for a request nobody can serve, Unavailable when no gallery can
        be asked."""

    async def resolve(self, request: BackendRequest, kind: MachineKind, /) -> TargetBuild | NoBuild:
        """The build for such a machine. Raises Unreachable, Failed or Unavailable when nobody can say now."""

    async def manifest(self, request: BackendRequest, kind: MachineKind, /) -> Manifest | None:
        """How the build for such a machine is run, as galleries say; no registry is asked. None: they do not."""

    async def available(self, kinds: Collection[tuple[str, str]]) -> Sequence[dict[str, Any]]:
        """Entries in LocalAI's form (docs/reference/wire/gallery.md#backend-entry), that a machine of one of these
        kinds can use."""

    async def upgrades(self, inventories: Sequence[NodeInventory]) -> dict[str, UpgradeInfo]:
        """By backend: what the galleries have that the nodes have not."""

    async def aliases(self, builds: Collection[str], /) -> Mapping[str, str]:
        """By build, the name it shares with others of its kind. What no gallery knows is left out; never raises."""

    async def refresh(self) -> None:
        """Read the galleries anew, and ask the registries anew."""

    def forget_sources(self) -> None:
        """What galleries and registries said of builds lately counts no more: somebody wants what is there now."""

    def galleries(self) -> Sequence[dict[str, Any]]:
        """Name, url and mirrors of each, without the built-in gallery."""

    async def galleries_with(self, request: BackendRequest, /) -> Sequence[dict[str, Any]]:
        """The gallery in which a LocalAI worker finds this entry, as it is sent to the worker. Never raises. If no
        gallery is known to have the entry: the galleries that could not be read."""
