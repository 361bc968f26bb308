"""Four GPUs of 8 GB and a model of 20: spread over them, or refused with the numbers."""

from __future__ import annotations

from typing import Any

from corral.contract.hardware import Device
from tests.support.replica_fleet import GIB, ReplicaFleet
from tests.support.waiting import until

FOUR: dict[str, Any] = {
    "gpu_vendor": "nvidia",
    "capability": "nvidia-cuda-12",
    "total_vram": 32 * GIB,
    "available_vram": 32 * GIB,
    "devices": tuple(
        Device(index=index, vendor="nvidia", uuid=f"GPU-{index}", total_bytes=8 * GIB, free_bytes=8 * GIB)
        for index in range(4)
    ),
}


async def test_it_is_spread_over_as_many_as_its_definition_says(local: ReplicaFleet) -> None:
    barn = await local.worker("barn", has="llama-cpp", **FOUR)
    await local.define("big", memory="20GiB", tensor_parallel=4)
    await local.ask("big")
    await local.until_ready("big")
    [order] = barn.started
    assert [device["uuid"] for device in order["devices"]] == ["GPU-0", "GPU-1", "GPU-2", "GPU-3"]
    assert order["memory_bytes"] == 20 * GIB


async def test_without_that_it_is_refused_with_the_numbers_and_a_way_out(local: ReplicaFleet) -> None:
    barn = await local.worker("barn", has="llama-cpp", **FOUR)
    await local.define("big", memory="20GiB")
    await local.ask("big")
    status = await local.until_failed("big")
    assert "needs 20.0 GiB on one GPU; GPU 0: 8.0 GiB free of 8.0 GiB" in status.error
    assert "with `tensor_parallel: 3` in its definition it would need 6.7 GiB on each of 3 GPUs" in status.error
    assert barn.replica_orders == []


async def test_what_runs_on_one_device_is_not_given_away_again(local: ReplicaFleet) -> None:
    barn = await local.worker("barn", has="llama-cpp", **FOUR)
    for name in ("a", "b", "c", "d", "e"):
        await local.define(name, memory="6GiB", pinned=True)
    for name in ("a", "b", "c", "d"):
        await local.ask(name)
        await local.until_ready(name)
    used = [order["devices"][0]["uuid"] for order in barn.started]
    assert sorted(used) == ["GPU-0", "GPU-1", "GPU-2", "GPU-3"]
    await local.ask("e")

    async def is_reported() -> bool:
        status = await local.status("e")
        return status is not None and "no node can run e (needs 6.0 GiB" in status.message

    await until(is_reported, "that it waits for room")
    assert len(barn.started) == 4
