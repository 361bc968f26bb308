"""The registration of this machine, out of settings and hardware (docs/reference/wire/nodes.md#registration). Pure."""

from __future__ import annotations

from corral import __version__
from corral.contract.hardware import HardwareReport
from corral.contract.labels import parse_labels
from corral.contract.messages.nodes import IngressOffer, NodeType, RegisterNode
from corral.contract.protocol import PROTOCOL
from corral.gallery.pypi.pip import own_python
from corral.worker.addresses import Told
from corral.worker.settings import WorkerSettings


def describe(settings: WorkerSettings, report: HardwareReport, told: Told, ingress: IngressOffer) -> RegisterNode:
    """All but name, token, enrolment and boot id, which are the joiner's."""
    slots = settings.max_replicas_per_model
    return RegisterNode(
        node_type=NodeType.BACKEND.value,
        address=told.address,
        http_address=told.http_address,
        total_vram=report.total_vram,
        # At the start all of it is told where usage cannot be measured; heartbeats then leave the number out.
        available_vram=report.total_vram if report.available_vram is None else report.available_vram,
        total_ram=report.total_ram,
        available_ram=report.available_ram or 0,
        total_disk=report.total_disk,
        available_disk=report.available_disk or 0,
        gpu_vendor=report.gpu_vendor,
        gpu_compute_capability=report.gpu_compute_capability,
        capability=report.capability,
        labels={**parse_labels(settings.labels), "node.replica-slots": str(slots)},
        max_replicas_per_model=slots,
        vram_budget=settings.vram_budget,
        protocol=PROTOCOL,
        platform=report.platform,
        devices=report.devices,
        ingress=ingress,
        version=__version__,
        python=own_python(),
    )
