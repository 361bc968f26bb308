"""A delete by a name that something wanted only goes by too: what is wanted stays, and all comes to rest."""

from __future__ import annotations

from datetime import UTC, datetime

from corral.contract.messages.backends import NodeBackend
from corral.controller.backends.plan import Done, NodeWorld, Step, plan
from corral.controller.backends.rules import Unwanted, Wanted
from corral.controller.orders.order import Build, Send
from corral.store.records import OrderKind

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
META = NodeBackend("llama-cpp", False, True, meta_backend_for="cpu-llama-cpp")
CPU = NodeBackend("cpu-llama-cpp", False, False, alias="llama-cpp", digest="sha256:1")
CUDA = NodeBackend("cuda-llama-cpp", False, False, alias="llama-cpp", digest="sha256:2")
BY_ITS_NAME = {"cpu-llama-cpp": Wanted("t", 1, "op1")}
DELETED = {"llama-cpp": Unwanted(3, "op3")}


def steps(wanted: dict[str, Wanted | Unwanted], *backends: NodeBackend) -> list[Step]:
    node = NodeWorld("n1", "barn", "healthy", boot_id="b1", reported_at=NOON, backends=backends)
    return plan(node, wanted, {"cpu-llama-cpp": Build("cpu-llama-cpp", "sha256:1")}, NOON)


def test_the_meta_goes_and_the_build_that_is_wanted_by_its_own_name_stays() -> None:
    """It was deleted by its alias and installed again, for ever."""
    there = Done("cpu-llama-cpp", "op1", 1, OrderKind.INSTALL, "sha256:1")
    delete = Send("llama-cpp", OrderKind.DELETE, None, 3, "op3", 1)
    assert steps({**BY_ITS_NAME, **DELETED}, META, CPU) == [there, delete]
    assert steps({**BY_ITS_NAME, **DELETED}, CPU) == [there, Done("llama-cpp", "op3", 3, OrderKind.DELETE)]


def test_what_nobody_wants_by_its_own_name_goes_by_any() -> None:
    delete = Send("llama-cpp", OrderKind.DELETE, None, 3, "op3", 1)
    assert steps({**DELETED}, CPU) == [delete]
    assert steps({"cpu-llama-cpp": Unwanted(1, "op1"), **DELETED}, CPU)[-1] == delete
    assert steps({**BY_ITS_NAME, **DELETED}, CPU, CUDA)[-1] == delete
