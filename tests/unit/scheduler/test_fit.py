"""Which devices of a node one process gets, and what is said when none will do."""

from __future__ import annotations

from typing import Any

import pytest

from corral.contract.hardware import Device
from corral.controller.scheduler.fit import DoesNotFit, Fit, find_fit
from corral.controller.scheduler.free_memory import free_memory_of
from corral.controller.scheduler.world import (
    GIB,
    Build,
    BuildState,
    Memory,
    Model,
    Node,
    Policy,
    Replica,
    ReplicaState,
    budget_of,
)
from tests.support.scheduling import INSTALLED, MANY, cpu_node, gpu, gpu_node, model, on, replica

ONE = Build(BuildState.INSTALLED, devices="one")
NONE = Build(BuildState.INSTALLED, devices="none")
FOUR = [gpu(index, 8) for index in range(4)]


def fit(of: Model, node: Node, build: Build = INSTALLED, *replicas: Replica) -> Fit | DoesNotFit:
    return find_fit(of, node, build, free_memory_of(node, replicas, Policy(ram_share=0)))


def chosen(of: Model, node: Node, build: Build = INSTALLED, *replicas: Replica) -> list[int]:
    found = fit(of, node, build, *replicas)
    assert isinstance(found, Fit), found.text
    return [device.index for device in found.devices]


def refused(of: Model, node: Node, build: Build = INSTALLED, *replicas: Replica) -> DoesNotFit:
    found = fit(of, node, build, *replicas)
    assert isinstance(found, DoesNotFit), found
    return found


def test_one_that_holds_it_is_enough() -> None:
    node = gpu_node(gpus=[gpu(0, 8, free_gib=5), gpu(1, 8)])
    found = fit(model(gib=6), node, MANY)
    assert isinstance(found, Fit)
    assert [device.uuid for device in found.devices] == ["GPU-1"]
    assert (found.memory_bytes, found.each_bytes, found.certain) == (6 * GIB, 6 * GIB, True)
    assert found.text == "needs 6.0 GiB; GPU 1: 8.0 GiB free of 8.0 GiB"


def test_the_device_with_fewest_replicas_then_the_roomiest() -> None:
    node = gpu_node(gpus=[gpu(0, 24), gpu(1, 16), gpu(2, 20)])
    assert chosen(model(gib=4), node, INSTALLED, replica(node, "other", 1, devices=on(0))) == [2]


# Issue 4: 4 × 8 GB GPUs and a 20 GB model.
def test_twenty_gigabytes_on_four_small_ones_where_the_backend_can_use_many() -> None:
    found = fit(model(gib=20), gpu_node(gpus=FOUR), MANY)
    assert isinstance(found, Fit)
    assert [device.index for device in found.devices] == [0, 1, 2, 3]
    assert (found.each_bytes, found.memory_bytes) == (5 * GIB, 20 * GIB)


def test_twenty_gigabytes_on_as_many_as_the_definition_says() -> None:
    found = fit(model(gib=18, tensor_parallel=3), gpu_node(gpus=FOUR))
    assert isinstance(found, Fit)
    assert (len(found.devices), found.each_bytes) == (3, 6 * GIB)


def test_twenty_gigabytes_are_refused_with_the_numbers_and_a_way_out() -> None:
    found = refused(model(gib=20), gpu_node(gpus=FOUR))
    assert not found.fits_when_empty
    assert found.text == (
        "needs 20.0 GiB on one GPU; GPU 0: 8.0 GiB free of 8.0 GiB, GPU 1: 8.0 GiB free of 8.0 GiB, "
        "GPU 2: 8.0 GiB free of 8.0 GiB, GPU 3: 8.0 GiB free of 8.0 GiB; "
        "with `tensor_parallel: 3` in its definition it would need 6.7 GiB on each of 3 GPUs"
    )


def test_forty_gigabytes_are_refused_without_false_hopes() -> None:
    found = refused(model(gib=40), gpu_node(gpus=FOUR), MANY)
    assert not found.fits_when_empty
    assert found.text.startswith("needs 4 equal GPUs with 10.0 GiB free on each (40.0 GiB in total); GPU 0:")
    assert "tensor_parallel" not in found.text


def test_what_every_device_needs_for_itself_is_not_shared_out() -> None:
    memory = Memory(total_bytes=17 * GIB, each_bytes=GIB)
    assert [memory.on_each(count) for count in (1, 2, 4)] == [17 * GIB, 9 * GIB, 5 * GIB]
    assert chosen(model(memory=memory), gpu_node(gpus=FOUR), MANY) == [0, 1, 2, 3]


def test_only_equal_devices_work_together() -> None:
    node = gpu_node(gpus=[gpu(0, 24), gpu(1, 8), gpu(2, 24, name="other")])
    assert "2 equal GPUs" in refused(model(gib=30), node, MANY).text
    node = gpu_node(gpus=[*node.devices, gpu(3, 24)])
    assert chosen(model(gib=30), node, MANY) == [0, 3]


def test_cards_of_one_kind_may_differ_by_what_the_driver_keeps() -> None:
    node = gpu_node(gpus=[gpu(0, 24), gpu(1, 23.99)])
    assert chosen(model(gib=40), node, MANY) == [0, 1]


def test_instances_of_a_card_are_not_spread_over() -> None:
    node = gpu_node(gpus=[gpu(0, 20, uuid="a", mig=0), gpu(0, 20, uuid="b", mig=1)])
    assert isinstance(fit(model(gib=30), node, MANY), DoesNotFit)
    assert isinstance(fit(model(gib=15), node, MANY), Fit)


def test_a_backend_for_one_device_is_not_spread() -> None:
    text = refused(model(gib=4, tensor_parallel=2), gpu_node(gpus=FOUR), ONE).text
    assert text == "tensor_parallel is 2, but its backend uses only one device"


@pytest.mark.parametrize(
    ("node", "build", "more"),
    [
        (cpu_node(), INSTALLED, {}),
        (gpu_node(), NONE, {}),
        (gpu_node(), INSTALLED, {"in_ram": True}),
        (gpu_node(capability="default"), INSTALLED, {}),
    ],
    ids=["no device", "a backend that uses none", "gpu_layers 0", "a build for CPUs"],
)
def test_some_live_in_ram(node: Node, build: Build, more: dict[str, Any]) -> None:
    found = fit(model(memory=Memory(3 * GIB, host_bytes=GIB), **more), node, build)
    assert isinstance(found, Fit)
    assert (found.devices, found.memory_bytes, found.host_bytes) == ((), 3 * GIB, GIB)
    assert found.text.startswith("needs 4.0 GiB of RAM; RAM: ")


def test_too_little_ram() -> None:
    found = refused(model(memory=Memory(3 * GIB, host_bytes=2 * GIB)), cpu_node(ram_gib=8, free_gib=4))
    assert found == DoesNotFit("needs 5.0 GiB of RAM; RAM: 4.0 GiB free of 8.0 GiB", fits_when_empty=True)


def test_a_backend_for_accelerators_on_a_machine_without() -> None:
    assert refused(model(gib=1), cpu_node(), ONE).text == "its backend needs an accelerator, and the node has none"


def test_the_process_needs_ram_besides() -> None:
    node = gpu_node(total_ram=4 * GIB, available_ram=1 * GIB)
    found = refused(model(memory=Memory(4 * GIB, host_bytes=2 * GIB)), node)
    assert found.text.endswith("; also needs 2.0 GiB of RAM, RAM: 1.0 GiB free of 4.0 GiB")
    assert found.fits_when_empty


def test_unified_memory_holds_weights_and_the_rest_together() -> None:
    device = gpu(0, 16, vendor="apple", unified=True)
    node = cpu_node(ram_gib=16, devices=(device,), gpu_vendor="apple", capability="metal")
    assert chosen(model(memory=Memory(14 * GIB, host_bytes=2 * GIB)), node) == [0]
    assert isinstance(fit(model(memory=Memory(14 * GIB, host_bytes=3 * GIB)), node), DoesNotFit)


def test_an_amount_bounds_all_devices_together() -> None:
    node = gpu_node(gpus=FOUR, budget=budget_of("12GiB"))
    assert chosen(model(gib=7), node) == [0]
    other = replica(node, "other", 6, devices=on(3), state=ReplicaState.STARTING)
    assert refused(model(gib=7), node, INSTALLED, other).text.endswith("; the budget leaves 6.0 GiB of 12.0 GiB")
    assert isinstance(fit(model(gib=20), node, MANY), DoesNotFit)


def test_an_engine_that_takes_its_share_needs_all_of_it() -> None:
    vllm = model(gib=4, device_share=0.9)
    node = gpu_node(gpus=[gpu(0, 20, free_gib=17), gpu(1, 20)])
    found = fit(vllm, node, MANY)
    assert isinstance(found, Fit)
    assert ([device.index for device in found.devices], found.memory_bytes) == ([1], 18 * GIB)
    assert "takes 90% of each" in refused(vllm, gpu_node(gpus=[gpu(0, 20, free_gib=17)]), MANY).text
    assert isinstance(fit(vllm, gpu_node(gpus=[gpu(0, 20)], budget=budget_of("10GiB")), MANY), DoesNotFit)


def test_an_engine_with_too_small_a_share_is_spread() -> None:
    assert chosen(model(gib=19, device_share=0.9), gpu_node(gpus=[gpu(0, 20), gpu(1, 20)]), MANY) == [0, 1]


def test_what_nobody_knows_is_not_refused_and_not_certain() -> None:
    for found in (
        fit(model(), gpu_node()),
        fit(model(gib=4), gpu_node(gpus=[Device(index=0, vendor="nvidia", total_bytes=0)])),
        fit(model(), cpu_node()),
        fit(model(gib=4), cpu_node(ram_gib=0)),
    ):
        assert isinstance(found, Fit)
        assert not found.certain


def test_full_now_is_not_full_for_ever() -> None:
    node = gpu_node(gpus=[gpu(0, 8, free_gib=2)])
    assert refused(model(gib=6), node, INSTALLED, replica(node, "other", 6, devices=on(0))).fits_when_empty
    assert not refused(model(gib=9), node).fits_when_empty
