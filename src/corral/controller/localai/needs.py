"""What the code for LocalAI workers needs of other packages. Records and Protocols only: importing it costs nothing."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from corral.bus.api import Bus
from corral.contract.messages.replicas import ReplicaFile
from corral.contract.models import Definition
from corral.controller.backends.catalogue import Catalogue
from corral.controller.files.model_files import ModelFiles
from corral.controller.registry.ingress_client import IngressClient
from corral.controller.runtime.change_feed import ChangeFeed
from corral.controller.runtime.leadership import Leadership
from corral.kit.clock import Clock
from corral.store.engine.transactions import Store


class KnownFiles(Protocol):
    async def known(self, definition: Definition) -> tuple[ReplicaFile, ...] | None:
        """What a model needs, as an order would name it; None when that is not known of every file."""


@dataclass(frozen=True)
class PeerDependencies:
    store: Store
    bus: Bus
    leadership: Leadership
    feed: ChangeFeed
    clock: Clock
    catalogue: Catalogue
    files: ModelFiles
    logs: IngressClient
    public_key: str  # of the tokens gateways show
    on_unreachable: Callable[[str], Awaitable[None]]  # with the id of a node on which no worker listens
