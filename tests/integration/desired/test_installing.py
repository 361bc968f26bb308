"""A backend on every node: at once, in the right build, and only done when the node shows it."""

from __future__ import annotations

from tests.support.backend_fleet import Fleet


async def test_every_node_gets_it_in_the_build_that_fits(fleet: Fleet) -> None:
    barn = await fleet.corral("barn")
    stall = await fleet.corral("stall", capability="nvidia")
    operation = await fleet.install("vllm")
    view = await fleet.until(operation, "done")
    assert {row.node_name: (row.status, row.variant) for row in view.nodes} == {
        "barn": ("success", "cpu-vllm"),
        "stall": ("success", "cuda-vllm"),
    }
    assert (view.progress, view.message, view.outcome) == (100, "completed", "completed")
    (order,) = barn.orders()
    assert order == {
        "backend": "vllm",
        "op_id": operation,
        "accept": True,
        "attempt": 1,
        "variant": "cpu-vllm",
        "digest": "sha256:cpu-vllm-1",
        "version": "1.0",
        "sources": [{"kind": "oci", "uri": "registry.test/cpu-vllm:1"}],
    }
    assert stall.orders()[0]["variant"] == "cuda-vllm"
    assert await fleet.inventory("barn") == ["vllm"]
