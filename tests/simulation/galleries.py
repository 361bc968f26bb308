"""The galleries of a simulated fleet: three backends, newer builds now and then, and times when nobody answers."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from random import Random
from typing import Any

from corral.contract.manifest import Manifest
from corral.contract.messages.backends import NodeBackend, UpgradeInfo
from corral.controller.backends.catalogue import CatalogueEntry, MachineKind, NodeInventory
from corral.controller.backends.plan import NoBuild
from corral.kit.errors import NotFound, Unavailable
from corral.store.records import BackendRequest, TargetBuild

BACKENDS = ("llama-cpp", "vllm", "piper")


class Galleries:
    """`Catalogue`, the same for all controllers."""

    def __init__(self, chance: Random) -> None:
        self.away = False
        self._chance = chance
        self._versions = dict.fromkeys(BACKENDS, 1)

    def publish(self, name: str) -> None:
        self._versions[name] += 1

    def digest(self, name: str, capability: str) -> str:
        """Of the newest build for such a machine."""
        return f"sha256:{name}-{'cuda' if capability == 'nvidia' else 'cpu'}-{self._versions[name]}"

    async def look_up(self, request: BackendRequest) -> CatalogueEntry:
        await self._answers()
        if request.backend not in self._versions:
            raise NotFound(f"no backend is called {request.backend!r}")
        return CatalogueEntry(request.backend, request=request)

    async def resolve(self, request: BackendRequest, machine: MachineKind) -> TargetBuild | NoBuild:
        await self._answers()
        name = request.backend
        if name == "piper" and machine.platform == "linux/arm64":
            return NoBuild("no linux/arm64 build")
        kind = "cuda" if machine.capability == "nvidia" else "cpu"
        return TargetBuild(
            variant=f"{kind}-{name}", digest=self.digest(name, machine.capability), version=f"{self._versions[name]}.0"
        )

    async def manifest(self, _asked: BackendRequest, _machine: MachineKind) -> Manifest | None:
        return None

    async def available(self, kinds: Collection[tuple[str, str]]) -> Sequence[dict[str, Any]]:
        return [{"name": name} for name in BACKENDS]

    async def upgrades(self, inventories: Sequence[NodeInventory]) -> dict[str, UpgradeInfo]:
        await self._answers()
        found: dict[str, UpgradeInfo] = {}
        for node in inventories:
            for row in node.backends:
                if _is_older(row, self._versions):
                    newest = f"{self._versions[row.name]}.0"
                    found[row.name] = UpgradeInfo(row.name, row.version, newest)
        return found

    async def aliases(self, builds: Collection[str]) -> Mapping[str, str]:
        return {}  # simulated workers list what they have under the name they were request for

    async def refresh(self) -> None:
        await self._answers()

    def forget_sources(self) -> None:
        """It remembers nothing."""

    def galleries(self) -> Sequence[dict[str, Any]]:
        return [{"name": "shelf", "url": "https://shelf.test/index.yaml"}]

    async def galleries_with(self, request: BackendRequest) -> Sequence[dict[str, Any]]:
        return self.galleries()

    async def _answers(self) -> None:
        if self._chance.random() < 0.5:
            await asyncio.sleep(self._chance.uniform(0, 2))
        if self.away:
            raise Unavailable("the gallery does not answer")


def _is_older(row: NodeBackend, versions: dict[str, int]) -> bool:
    return row.name in versions and row.version not in ("", f"{versions[row.name]}.0")
