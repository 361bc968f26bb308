"""An order to a worker, and the id that answers refer to. Records only.

The plan of `controller/backends` decides a `Send`; the reconciler adds the build that fits the node, and
`backend_calls` sends the resulting `BackendOrder`. Orders about replicas are the messages of
`contract/messages/replicas.py` themselves.
"""

from __future__ import annotations

from dataclasses import dataclass

from corral.store.records import BackendRequest, OrderKind, TargetBuild

NO_GALLERY_FOR_LOCALAI = "no gallery that a LocalAI worker can read has it"


@dataclass(frozen=True)
class OrderId:
    """A worker carries out an order once, however often it receives the same id."""

    node_id: str
    operation: str
    attempt: int
    backend: str = ""  # empty for an order about a replica


@dataclass(frozen=True)
class Build:
    """The build of a backend that fits one node."""

    variant: str
    digest: str  # empty: unknown until the build is installed
    version: str = ""


@dataclass(frozen=True)
class Send:
    """The plan's decision to send an order."""

    backend: str
    kind: OrderKind
    build: Build | None  # None for a delete
    generation: int
    operation: str
    attempt: int
    force: bool = False
    again: bool = False  # the same order once more: a worker that has carried it out answers so
    before: str = ""
    max_parallel: str = ""
    fetched: bool = False  # the build is stored beside the current one already: only the switch is left


@dataclass(frozen=True)
class BackendOrder:
    node_id: str
    accepts: bool  # the worker replies at once and reports later; a LocalAI worker replies when it has finished
    boot_id: str
    send: Send
    request: BackendRequest
    build: TargetBuild | None
    in_place: bool = False  # the running processes have to end before their successors start

    @property
    def id(self) -> OrderId:
        return OrderId(self.node_id, self.send.operation, self.send.attempt, self.send.backend)
