"""A catalogue that says what a test wrote into it."""

from __future__ import annotations

import asyncio
import difflib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from corral.contract.manifest import Manifest
from corral.contract.messages.backends import UpgradeInfo
from corral.contract.sources import Source
from corral.controller.backends.catalogue import CatalogueEntry, MachineKind, NodeInventory
from corral.controller.backends.plan import NoBuild
from corral.kit.errors import CorralError, Invalid, NotFound
from corral.store.records import BackendRequest, TargetBuild


def build(variant: str, digest: str = "", **more: Any) -> TargetBuild:
    digest = digest or f"sha256:{variant}-1"
    return TargetBuild(
        variant, digest, **({"version": "1.0", "sources": (Source("oci", f"registry.test/{variant}:1"),)} | more)
    )


class ScriptedCatalogue:
    """`builds[name]` by (capability, platform), by capability, or under `*` for every machine."""

    def __init__(self) -> None:
        self.builds: dict[str, dict[Any, TargetBuild | NoBuild | CorralError]] = {
            "vllm": {"*": build("cpu-vllm"), "nvidia": build("cuda-vllm")},
            "llama-cpp": {"*": build("cpu-llama-cpp")},
        }
        self.concrete: dict[str, str] = {"cuda-vllm": "vllm"}
        self.shared: dict[str, str] = {}  # by build, its alias
        self.slow: asyncio.Event | None = None  # resolving waits for it
        self.asked: list[tuple[BackendRequest, MachineKind]] = []
        self.newer: dict[str, UpgradeInfo] = {}
        self.refreshed = 0
        self.forgotten = 0

    def publish(self, name: str, digest: str, capability: str = "*", version: str = "2.0") -> None:
        """The gallery has a new build."""
        before = self.builds[name][capability]
        assert isinstance(before, TargetBuild)
        self.builds[name][capability] = msgspec.structs.replace(before, digest=digest, version=version)

    async def look_up(self, request: BackendRequest) -> CatalogueEntry:
        if request.uri:
            if not request.backend:
                raise Invalid("an image needs a name")
            return CatalogueEntry(request.backend, request=request)
        name = request.backend.rpartition("@")[2]
        if name in self.concrete:
            return CatalogueEntry(name, hardware_specific=True, meta_alternative=self.concrete[name])
        if name not in self.builds:
            near = difflib.get_close_matches(name, self.builds)
            raise NotFound(f"no backend is called {name!r}; did you mean {', '.join(near)}?")
        return CatalogueEntry(name, request=msgspec.structs.replace(request, backend=name))

    async def resolve(self, request: BackendRequest, kind: MachineKind) -> TargetBuild | NoBuild:
        capability, platform, _ = kind
        self.asked.append((request, kind))
        if self.slow is not None:
            await self.slow.wait()
        if request.uri:
            return build(request.backend, "", sources=(Source("oci", request.uri),))
        name = request.backend
        if name in self.concrete:
            return build(name)
        known = self.builds.get(name)
        if known is None:
            raise NotFound(f"no backend is called {name!r}")
        found = known.get((capability, platform)) or known.get(capability) or known["*"]
        if isinstance(found, CorralError):
            raise found
        return found

    async def manifest(self, request: BackendRequest, kind: MachineKind) -> Manifest | None:
        known = self.builds.get(request.backend, {})
        found = known.get((kind.capability, kind.platform)) or known.get(kind.capability) or known.get("*")
        return found.manifest if isinstance(found, TargetBuild) else None

    async def available(self, kinds: Collection[tuple[str, str]]) -> Sequence[dict[str, Any]]:
        return [{"name": name, "description": f"the {name}", "tags": ["llm"]} for name in sorted(self.builds)]

    async def upgrades(self, inventories: Sequence[NodeInventory]) -> dict[str, UpgradeInfo]:
        return dict(self.newer)

    async def aliases(self, builds: Collection[str]) -> Mapping[str, str]:
        return {name: self.shared[name] for name in builds if name in self.shared}

    async def refresh(self) -> None:
        self.refreshed += 1

    def forget_sources(self) -> None:
        self.forgotten += 1

    def galleries(self) -> Sequence[dict[str, Any]]:
        return [{"name": "test", "url": "https://gallery.test/index.yaml"}]

    async def galleries_with(self, request: BackendRequest) -> Sequence[dict[str, Any]]:
        return self.galleries()


async def no_galleries(_backend: str) -> str:
    """For workers whose backends are all there."""
    return "[]"
