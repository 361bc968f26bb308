"""Models of a simulated fleet as controllers know them, and where their files come from."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from random import Random

from corral.contract.messages.replicas import ReplicaFile
from corral.contract.models import Definition
from corral.contract.sources import Wheel
from corral.controller.distribution.own_wheel import OwnWheel
from corral.controller.models.service import Models
from corral.controller.models.views import definition_of
from corral.kit.errors import Failed, NotFound, Unavailable
from corral.store.engine.transactions import Store
from corral.store.tables import models


class SimulatedFiles:
    """Files of models, on the controllers: there at once, later, or not at all."""

    def __init__(self, chance: Random) -> None:
        self.away = False
        self.fails = 0.0
        self._chance = chance

    async def ensure(self, definition: Definition, _tell: object) -> tuple[ReplicaFile, ...]:
        await asyncio.sleep(self._chance.choice((0.0, 0.0, 1.0, 20.0)))
        if self.away:
            raise Unavailable("where its files are kept is away")
        if self._chance.random() < self.fails:
            raise Failed("there is no such file")
        return (ReplicaFile(f"{definition.name}.gguf", f"sha256:{definition.name}", 1000),)

    def find(self, _digest: str) -> Path | None:
        return None

    def sources_for(self, _node_id: str, _files: Sequence[ReplicaFile] = ()) -> tuple[tuple[str, ...], str]:
        return ("https://blobs.test",), "token"


class SimulatedPackages:
    """The wheels of a release, on the controllers: there in a moment, or not to be had."""

    def __init__(self, chance: Random) -> None:
        self.fails = 0.0
        self._chance = chance

    async def fetch_all(self, _release: OwnWheel, _platform: str, _python: str) -> tuple[Wheel, ...]:
        await asyncio.sleep(self._chance.choice((0.0, 1.0, 20.0)))
        if self._chance.random() < self.fails:
            raise Unavailable("the package index is away")
        return ()

    def find(self, digest: str) -> str:
        """As a store of blobs, which has them all."""
        return digest


class SimulatedModels(Models):
    """The catalogue without galleries, as far as loads need it."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def ensure(self, name: str, *, by: str = "", install: bool = True) -> Definition:
        async with self._store.read() as tx:
            rows = await models.list_(tx, [name])
        definition = definition_of(rows[0]) if rows else None
        if definition is None:
            raise NotFound(f"there is no model {name}")
        return definition
