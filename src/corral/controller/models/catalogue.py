"""What the service of models needs of galleries; `galleries.py` has it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from corral.contract.models import Definition
from corral.gallery.models.entries import ModelEntry


class ModelCatalogue(Protocol):
    async def available(self) -> Sequence[ModelEntry]:
        """Everything, in the order of the galleries; those that cannot be read are left out."""

    async def find(self, query: str) -> ModelEntry:
        """By name or gallery@name. Raises NotFound with names that are near, Unavailable when its gallery is silent."""

    async def define(
        self, entry: ModelEntry, *, variant: str = "", name: str = "", overrides: Mapping[str, Any] | None = None
    ) -> Definition:
        """What it comes to. Raises NotFound for a variant it has not, Invalid where nothing can come of it."""

    async def refresh(self) -> None:
        """The next to ask reads the galleries anew."""

    def unread(self) -> Mapping[str, str]:
        """Galleries that could not be read the last time, and why."""
