"""Gauges of nodes and devices, and what is left out where nothing was measured."""

from __future__ import annotations

from corral.contract.hardware import Device
from corral.contract.loads import LoadState
from corral.controller.inventory.activity import ProcessActivity
from corral.controller.metrics.fleet import FleetMetrics, FleetState, label_devices
from corral.controller.metrics.replicas import ReplicaMetrics
from corral.store.records import ReplicaStage
from corral.store.tables.nodes import NodeHardware
from tests.integration.store.rows import a_job, a_replica

GIB = 1024**3


def shown(state: FleetState, **waiting: int) -> dict[str, float]:
    metrics = FleetMetrics(lambda _node, process: ProcessActivity(3 if process == "busy" else 0, True), lambda: waiting)
    metrics._state = state
    return {f"{sample.name}{sample.labels}": sample.value for family in metrics.collect() for sample in family.samples}


def test_devices_show_what_was_measured() -> None:
    devices = (
        Device(index=0, vendor="nvidia", name="H200", total_bytes=9, free_bytes=4, temperature_c=44, power_w=300),
        Device(index=1, vendor="nvidia", name="H200", total_bytes=9),
    )
    found = shown(FleetState(hardware=[NodeHardware("barn", "healthy", GIB, 0, 0, 0, devices)]))
    first = {"node": "barn", "device": "0", "name": "H200", "vendor": "nvidia"}
    assert found[f"corral_device_power_watts{first}"] == 300
    assert found[f"corral_device_temperature_celsius{first}"] == 44
    assert found[f"corral_device_memory_free_bytes{first}"] == 4
    assert [name for name in found if "'device': '1'" in name] == [
        f"corral_device_memory_bytes{first | {'device': '1'}}"
    ]
    assert found["corral_node_memory_free_bytes{'node': 'barn'}"] == 0  # all in use, not unknown
    assert not any(name.startswith("corral_node_disk") for name in found)


def test_devices_of_one_node_have_labels_of_their_own() -> None:
    devices = [
        Device(index=0, vendor="nvidia", mig=0),
        Device(index=0, vendor="nvidia", mig=1),
        Device(index=0, vendor="amd"),
        Device(index=0, vendor="intel"),
    ]
    assert list(label_devices(devices)) == ["0.0", "0.1", "0", "intel-0"]


def test_replicas_requests_and_loads() -> None:
    rows = [
        a_replica(node_id="n1", model="a", stage=ReplicaStage("running"), process_id="busy"),
        a_replica(node_id="n1", model="b", stage=ReplicaStage("running"), process_id="idle"),
    ]
    jobs = [a_job(model="c", state=LoadState("loading"))]
    found = shown(FleetState(node_names={"n1": "barn"}, rows=rows, jobs=jobs), a=2)
    assert found["corral_requests_in_flight{'model': 'a', 'node': 'barn'}"] == 3
    assert found["corral_requests_in_flight{'model': 'b', 'node': 'barn'}"] == 0
    assert found["corral_replicas{'model': 'a', 'stage': 'running'}"] == 1
    assert [found[f"corral_requests_waiting{{'model': '{model}'}}"] for model in "abc"] == [2, 0, 0]
    assert found["corral_loads{'state': 'loading'}"] == 1
    assert found["corral_loads{'state': 'failed'}"] == 0


def test_thousands_of_models_are_no_thousands_of_series() -> None:
    rows = [a_replica("n1", f"m{number}", stage=ReplicaStage("running"), process_id="busy") for number in range(500)]
    found = shown(FleetState(rows=rows))
    in_flight = {name: value for name, value in found.items() if name.startswith("corral_requests_in_flight")}
    assert len(in_flight) == 201
    assert sum(in_flight.values()) == 1500


def test_evictions_and_loads_beyond_the_limit_count_as_other() -> None:
    metrics = ReplicaMetrics()
    for number in range(300):
        metrics.on_evicted(f"m{number}", "barn")
        metrics.on_loaded(f"m{number}", "barn", 2.0)
    evictions, loads = metrics.collect()
    assert {(s.labels["model"], s.value) for s in evictions.samples if s.labels["model"] == "other"} == {("other", 100)}
    assert sum(s.value for s in evictions.samples) == 300
    assert sum(s.value for s in loads.samples if s.name.endswith("_count")) == 300


def test_evictions_are_zero_once_a_replica_is_loaded() -> None:
    metrics = ReplicaMetrics()
    metrics.on_loaded("m", "barn", 2.0)
    assert [(s.labels, s.value) for s in metrics.collect()[0].samples] == [({"model": "m", "node": "barn"}, 0)]
