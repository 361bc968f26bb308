"""The state of the fleet as gauges, read from the database at each scrape: nodes, their devices, replicas and loads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from corral.contract.hardware import Device
from corral.contract.loads import LoadState
from corral.controller.inventory.activity import ProcessActivity
from corral.controller.metrics.labels import MAX_PAIRS, NONE, OTHER
from corral.store.engine.transactions import Transaction
from corral.store.records import DesiredReplica, LoadJob
from corral.store.tables import load_jobs, nodes, replicas
from corral.store.tables.nodes import NodeHardware

T = TypeVar("T", bound=tuple[str, ...])

MAX_NODES: Final = 1000  # with gauges of their own, in the order of their names
_ON_DEVICE: Final = ["node", "device", "name", "vendor"]


@dataclass(frozen=True)
class FleetState:
    hardware: Sequence[NodeHardware] = ()
    node_names: Mapping[str, str] = field(default_factory=dict)
    rows: Sequence[DesiredReplica] = ()
    jobs: Sequence[LoadJob] = ()


class FleetMetrics(Collector):
    def __init__(
        self,
        activity_of: Callable[[str, str], ProcessActivity],
        waiting: Callable[[], Mapping[str, int]],
    ) -> None:
        """`activity_of`: of a node and a process; `waiting`: requests that wait at gateways, by model."""
        self._activity_of = activity_of
        self._waiting = waiting
        self._state = FleetState()

    async def refresh(self, tx: Transaction) -> None:
        self._state = FleetState(
            hardware=await nodes.list_hardware(tx, limit=MAX_NODES),
            node_names=await nodes.list_names(tx),
            rows=await replicas.list_(tx),
            jobs=await load_jobs.list_(tx),
        )

    def collect(self) -> Iterable[Metric]:
        yield from _nodes(self._state.hardware)
        yield from _devices(self._state.hardware)
        yield from self._replicas()

    def _replicas(self) -> Iterable[Metric]:
        names = self._state.node_names
        by_stage = Counter((row.model, row.stage.value) for row in self._state.rows)
        in_flight: Counter[tuple[str, str]] = Counter()
        for row in self._state.rows:
            if row.process_id:
                count = self._activity_of(row.node_id, row.process_id).in_flight
                in_flight[row.model, names.get(row.node_id, NONE)] += count
        waiting = Counter({row.model: 0 for row in self._state.rows})
        waiting.update({job.model: 0 for job in self._state.jobs})
        waiting.update(self._waiting())
        loads = Counter({state.value: 0 for state in LoadState})
        loads.update(job.state.value for job in self._state.jobs)
        yield _family("corral_replicas", "Replicas by stage.", ["model", "stage"], by_stage)
        yield _family(
            "corral_requests_in_flight",
            "Requests in flight at replicas, as the nodes reported within the last seconds.",
            ["model", "node"],
            in_flight,
        )
        yield _family(
            "corral_requests_waiting",
            "Requests that wait at gateways for a slot or a load.",
            ["model"],
            Counter({(model,): count for model, count in waiting.items()}),
        )
        yield _family(
            "corral_loads", "Loads by state.", ["state"], Counter({(state,): count for state, count in loads.items()})
        )


def _family(name: str, text: str, labels: Sequence[str], counts: Counter[T]) -> GaugeMetricFamily:
    """The largest `MAX_PAIRS` counts by their own labels, and the sum of the others."""
    family = GaugeMetricFamily(name, text, labels=labels)
    largest = sorted(counts.items(), key=lambda entry: (-entry[1], entry[0]))
    for values, count in largest[:MAX_PAIRS]:
        family.add_metric(values, count)
    if rest := largest[MAX_PAIRS:]:
        family.add_metric([OTHER] * len(labels), sum(count for _, count in rest))
    return family


def _nodes(known: Sequence[NodeHardware]) -> Iterable[Metric]:
    status = GaugeMetricFamily("corral_node_status", "1 for the status that a node has.", labels=["node", "status"])
    fields = {
        "total_ram": ("corral_node_memory_bytes", "Memory of the machine."),
        "available_ram": ("corral_node_memory_free_bytes", "Free memory of the machine."),
        "total_disk": ("corral_node_disk_bytes", "Size of the file system that has the models."),
        "available_disk": ("corral_node_disk_free_bytes", "Free space of the file system that has the models."),
    }
    gauges = {field: GaugeMetricFamily(name, text, labels=["node"]) for field, (name, text) in fields.items()}
    for node in known:
        status.add_metric([node.name, node.status], 1)
        for measured, total in (("total_ram", node.total_ram), ("available_ram", node.total_ram),
                                ("total_disk", node.total_disk), ("available_disk", node.total_disk)):  # fmt: skip
            if total:
                gauges[measured].add_metric([node.name], getattr(node, measured))
    return status, *gauges.values()


def _devices(known: Sequence[NodeHardware]) -> Iterable[Metric]:
    readings: dict[str, tuple[str, Callable[[Device], float | None]]] = {
        "corral_device_memory_bytes": ("Memory of an accelerator.", lambda device: device.total_bytes or None),
        "corral_device_memory_free_bytes": ("Free memory of an accelerator.", lambda device: device.free_bytes),
        "corral_device_temperature_celsius": ("Temperature of an accelerator.", lambda device: device.temperature_c),
        "corral_device_power_watts": ("Power that an accelerator draws.", lambda device: device.power_w),
        "corral_device_utilisation_ratio": (
            "Share of the time in which an accelerator worked, 0 to 1.",
            lambda device: device.utilisation,
        ),
    }
    gauges = {name: GaugeMetricFamily(name, text, labels=_ON_DEVICE) for name, (text, _) in readings.items()}
    for node in known:
        for number, device in label_devices(node.devices).items():
            for name, (_, read) in readings.items():
                if (value := read(device)) is not None:
                    gauges[name].add_metric([node.name, number, device.name, device.vendor], value)
    return tuple(gauges.values())


def label_devices(devices: Iterable[Device]) -> dict[str, Device]:
    """By a short label: the driver's number, with the MIG instance where there is one. A node reports each once; of two
    with one label the first counts."""
    found: dict[str, Device] = {}
    for device in devices:
        label = str(device.index) if device.mig is None else f"{device.index}.{device.mig}"
        if label in found:
            label = f"{device.vendor}-{label}"
        found.setdefault(label, device)
    return found
