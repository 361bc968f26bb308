"""An order about a backend, as the plan decides it and `backend_calls` sends it. Records only."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

NO_GALLERY_FOR_LOCALAI = "no gallery that a LocalAI worker can read has it"


class OrderKind(StrEnum):
    INSTALL = "install"
    FETCH = "fetch"  # the first half of an upgrade that goes node by node: beside what is current, which stays
    UPGRADE = "upgrade"
    DELETE = "delete"


@dataclass(frozen=True)
class Build:
    """The build of a backend that fits one node."""

    variant: str
    digest: str  # empty: nobody can say before it is there
    version: str = ""


@dataclass(frozen=True)
class Send:
    backend: str
    kind: OrderKind
    build: Build | None  # None for a delete
    generation: int
    operation: str
    attempt: int
    force: bool = False
    again: bool = False  # the same order once more: whoever did it already says so
    before: str = ""
    max_parallel: str = ""
    fetched: bool = False  # it is beside the current one already: all that is left is to switch
