"""What may be handed out on a node: the smaller of what was measured and what is not reserved."""

from __future__ import annotations

import pytest

from corral.contract.hardware import Device
from corral.contract.messages.replicas import ReplicaDevice
from corral.controller.scheduler.free_memory import as_if_empty, devices_of, free_memory_of, is_same_device
from corral.controller.scheduler.world import GIB, Node, Policy, Replica, ReplicaState, budget_of
from tests.support.scheduling import cpu_node, gpu, gpu_node, on, replica

NO_SPARE = Policy(ram_share=0.0)


def gib(size: int | None) -> float | None:
    return None if size is None else round(size / GIB, 2)


def free_gib_on(node: Node, *replicas: Replica, policy: Policy = NO_SPARE) -> list[float | None]:
    return [gib(pool.free_bytes) for pool in free_memory_of(node, replicas, policy).devices]


def ram(node: Node, *replicas: Replica, policy: Policy = NO_SPARE) -> float | None:
    return gib(free_memory_of(node, replicas, policy).ram.free_bytes)


def test_what_others_use_is_not_free() -> None:
    assert free_gib_on(gpu_node(gpus=[gpu(0, 8, free_gib=3)])) == [3]


def test_a_replica_that_starts_does_not_show_in_what_was_measured() -> None:
    node = gpu_node(gpus=[gpu(0, 8), gpu(1, 8)])
    assert free_gib_on(node, replica(node, "m", 6, state=ReplicaState.STARTING, devices=on(0))) == [2, 8]


def test_a_ready_replica_is_not_counted_twice() -> None:
    node = gpu_node(gpus=[gpu(0, 8, free_gib=2)])
    assert free_gib_on(node, replica(node, "m", 6, devices=on(0))) == [2]


def test_mapped_weights_that_do_not_look_used_are_reserved_all_the_same() -> None:
    node = cpu_node(ram_gib=16, free_gib=16)
    assert ram(node, replica(node, "m", 6, host_bytes=GIB)) == 9


def test_more_use_than_reserved_is_believed() -> None:
    node = gpu_node(gpus=[gpu(0, 8, free_gib=1)])
    assert free_gib_on(node, replica(node, "m", 2, devices=on(0))) == [1]


def test_memory_of_the_stopping_is_still_theirs() -> None:
    node = gpu_node(gpus=[gpu(0, 8, free_gib=2)])
    assert free_gib_on(node, replica(node, "m", 6, devices=on(0), state=ReplicaState.STOPPING)) == [2]


def test_what_is_spread_takes_a_part_of_each() -> None:
    node = gpu_node(gpus=[gpu(0), gpu(1), gpu(2)])
    spread = replica(node, "m", 10, devices=on(0, 1), state=ReplicaState.STARTING)
    assert free_gib_on(node, spread) == [3, 3, 8]


def test_use_that_is_not_measured_is_what_we_reserved() -> None:
    device = Device(index=0, vendor="nvidia", uuid="GPU-0", total_bytes=8 * GIB)
    node = gpu_node(gpus=[device])
    found = free_memory_of(node, [replica(node, "m", 5, devices=on(0))], Policy())
    assert gib(found.devices[0].free_bytes) == 3
    assert not found.devices[0].measured
    assert str(found.devices[0]) == "GPU 0: 3.0 GiB free of 8.0 GiB, use not measured"


def test_a_device_that_does_not_say_what_it_has_is_not_known() -> None:
    node = gpu_node(gpus=[Device(index=0, vendor="intel", total_bytes=0)], gpu_vendor="intel")
    (pool,) = free_memory_of(node, (), Policy()).devices
    assert not pool.known
    assert pool.can_hold(1 << 60)
    assert str(pool) == "GPU 0: size not reported"


@pytest.mark.parametrize(
    ("budget", "left", "of_budget"),
    [
        ("", [8, 8], None),
        ("50%", [4, 4], None),
        ("6GiB", [8, 8], 6),
        ("100GiB", [8, 8], 16),
        ("nonsense", [8, 8], None),
    ],
)
def test_a_share_is_of_each_device_and_an_amount_of_all(
    budget: str, left: list[float], of_budget: float | None
) -> None:
    node = gpu_node(gpus=[gpu(0), gpu(1)], budget=budget_of(budget))
    found = free_memory_of(node, (), Policy())
    assert [gib(pool.free_bytes) for pool in found.devices] == left
    assert gib(found.left_of_budget) == of_budget


def test_what_is_reserved_is_used_of_the_budget() -> None:
    node = gpu_node(gpus=[gpu(0), gpu(1)], budget=budget_of("6GiB"))
    found = free_memory_of(node, [replica(node, "m", 4, devices=on(0, 1))], Policy())
    assert gib(found.left_of_budget) == 2
    assert gib(as_if_empty(found).left_of_budget) == 6


def test_a_share_counts_what_is_ours_not_what_is_free() -> None:
    node = gpu_node(gpus=[gpu(0, 8, free_gib=5)], budget=budget_of("50%"))
    assert free_gib_on(node, replica(node, "m", 3, devices=on(0))) == [1]


def unified(total_gib: float = 16) -> Device:
    return gpu(0, total_gib, vendor="apple", uuid="", unified=True)


def test_unified_memory_and_ram_are_the_same_bytes() -> None:
    node = cpu_node(ram_gib=16, devices=(unified(),), gpu_vendor="apple", capability="metal")
    starting = ReplicaState.STARTING
    in_ram = replica(node, "a", 4, state=starting)
    on_device = replica(node, "b", 5, state=starting, devices=(ReplicaDevice(vendor="apple", index=0),))
    assert free_gib_on(node, in_ram, on_device) == [7]
    assert ram(node, in_ram, on_device) == 7


def test_a_device_has_no_more_of_the_ram_than_there_is() -> None:
    node = cpu_node(ram_gib=16, free_gib=3, devices=(unified(),), gpu_vendor="apple", capability="metal")
    assert free_gib_on(node) == [3]


def test_unified_memory_without_numbers_of_its_own_has_those_of_the_ram() -> None:
    device = Device(index=0, vendor="apple", total_bytes=0, unified=True)
    node = cpu_node(ram_gib=16, free_gib=12, devices=(device,), gpu_vendor="apple", capability="metal")
    assert free_gib_on(node) == [12]


def test_some_ram_is_never_handed_out() -> None:
    policy = Policy(ram_share=0.05, ram_spare_bytes=GIB)
    assert ram(cpu_node(ram_gib=10), policy=policy) == 9.5
    assert ram(cpu_node(ram_gib=100), policy=policy) == 99


def test_a_machine_that_tells_no_ram_is_not_refused_for_it() -> None:
    node = cpu_node(ram_gib=0)
    assert free_memory_of(node, (), Policy()).ram.can_hold(1 << 60)


def test_a_worker_that_tells_sums_has_one_device() -> None:
    node = Node("id", "w", gpu_vendor="amd", total_vram=24 * GIB, available_vram=20 * GIB)
    (device,) = devices_of(node)
    assert (device.vendor, device.index, gib(device.free_bytes)) == ("amd", 0, 20)
    assert free_gib_on(node) == [20]


def test_only_devices_of_the_vendor_the_builds_are_for() -> None:
    node = gpu_node(gpus=[gpu(0, vendor="intel", uuid="i"), gpu(1)])
    assert [device.uuid for device in devices_of(node)] == ["GPU-1"]
    assert [device.uuid for device in devices_of(gpu_node(gpus=node.devices, gpu_vendor="vulkan"))] == ["i", "GPU-1"]


def test_the_gone_give_back_what_they_had() -> None:
    node = gpu_node(gpus=[gpu(0, 8, free_gib=1)])
    ready, other = replica(node, "a", 4, devices=on(0)), replica(node, "b", 3, devices=on(0))
    found = free_memory_of(node, [ready, other], Policy(), without={ready.key})
    assert gib(found.devices[0].free_bytes) == 5


def test_the_gone_who_never_showed_give_back_only_their_reservation() -> None:
    node = gpu_node(gpus=[gpu(0, 8, free_gib=6)])
    starting = replica(node, "a", 4, devices=on(0), state=ReplicaState.STARTING)
    assert free_gib_on(node, starting) == [2]
    found = free_memory_of(node, [starting], Policy(), without={starting.key})
    assert gib(found.devices[0].free_bytes) == 6


def test_instances_of_one_card_are_told_apart_by_id() -> None:
    cards = [gpu(0, 20, uuid="MIG-a", mig=1), gpu(0, 20, uuid="MIG-b", mig=2)]
    node = gpu_node(gpus=cards)
    device = ReplicaDevice(vendor="nvidia", index=0, uuid="MIG-b")
    assert free_gib_on(node, replica(node, "m", 5, devices=(device,), state=ReplicaState.STARTING)) == [20, 15]
    assert [pool.name for pool in free_memory_of(node, (), Policy()).devices] == ["GPU 0 MIG 1", "GPU 0 MIG 2"]


def test_some_ram_is_never_handed_out_whatever_is_measured() -> None:
    """Five percent of the machine, but no more than one GiB; of what is free as well as of what there is."""
    assert ram(cpu_node(ram_gib=16, free_gib=5), policy=Policy()) == 4.2
    assert ram(cpu_node(ram_gib=64, free_gib=5), policy=Policy()) == 4
    assert ram(cpu_node(ram_gib=16, free_gib=16), policy=Policy()) == 15.2
    assert ram(cpu_node(ram_gib=16, free_gib=0.5), policy=Policy()) == 0


def test_memory_of_one_that_starts_is_handed_out_once() -> None:
    node = cpu_node(ram_gib=16, free_gib=9)
    assert ram(node, replica(node, "m", 4, state=ReplicaState.STARTING)) == 5
    assert ram(node, replica(node, "m", 4)) == 9, "it shows in what was measured"


@pytest.mark.parametrize(
    ("device", "named", "same"),
    [
        (gpu(0, uuid="GPU-a"), ReplicaDevice(vendor="nvidia", index=0, uuid="GPU-a"), True),
        (gpu(0, uuid="GPU-a"), ReplicaDevice(vendor="nvidia", index=0, uuid="GPU-b"), False),
        (gpu(0, uuid="GPU-a"), ReplicaDevice(vendor="nvidia", index=0), True),
        (gpu(0, uuid=""), ReplicaDevice(vendor="nvidia", index=0, uuid="GPU-a"), True),
        (gpu(0, uuid=""), ReplicaDevice(vendor="nvidia", index=1), False),
        (gpu(0, uuid="", vendor="amd"), ReplicaDevice(vendor="nvidia", index=0), False),
    ],
)
def test_which_device_a_replica_names(device: Device, named: ReplicaDevice, same: bool) -> None:
    assert is_same_device(device, named) == same


def test_replicas_are_counted_where_they_live() -> None:
    node = gpu_node(gpus=[gpu(0), gpu(1)])
    there = [replica(node, "a", 4, devices=on(0)), replica(node, "b", 4, devices=on(0, 1)), replica(node, "c", 4)]
    found = free_memory_of(node, there, NO_SPARE)
    assert (found.ram.replicas, [pool.replicas for pool in found.devices]) == (1, [2, 1])
    ended = free_memory_of(node, there, NO_SPARE, without={each.key for each in there})
    assert (ended.ram.replicas, [pool.replicas for pool in ended.devices]) == (0, [0, 0])
