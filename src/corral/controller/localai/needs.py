"""What of other rooms serving LocalAI workers takes. Records and Protocols only: importing this costs nothing."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from corral.blobs.progress import OnProgress
from corral.bus.api import Bus
from corral.contract.messages.replicas import ReplicaFile
from corral.contract.models import Definition
from corral.controller.backends.catalogue import Catalogue
from corral.controller.runtime.change_feed import ChangeFeed
from corral.controller.runtime.leadership import Leadership
from corral.kit.clock import Clock
from corral.store.engine.transactions import Store
from corral.store.tables.nodes import Node


class KnownFiles(Protocol):
    async def known(self, definition: Definition) -> tuple[ReplicaFile, ...] | None:
        """What a model needs, as an order would name it; None when that is not known of every file."""


class ModelFiles(KnownFiles, Protocol):
    async def ensure(self, definition: Definition, tell: OnProgress) -> tuple[ReplicaFile, ...]:
        """All of them on this controller."""

    def find(self, digest: str) -> Path | None:
        """One of them, where it is here."""

    async def keep_list(self, document: bytes) -> str:
        """For orders to Corral workers, see `ReplicaCalls`."""


class Logs(Protocol):
    async def logs(self, node: Node, path: str) -> bytes:
        """JSON of a node's own, about what its backends wrote."""


@dataclass(frozen=True)
class PeerDependencies:
    store: Store
    bus: Bus
    leadership: Leadership
    feed: ChangeFeed
    clock: Clock
    catalogue: Catalogue
    files: ModelFiles
    logs: Logs
    public_key: str  # of the tokens gateways show
    on_unreachable: Callable[[str], Awaitable[None]]  # with the id of a node on which no worker listens
