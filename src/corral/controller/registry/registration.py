"""What a registration says, made into what is stored. Pure: validation order and merge rules of
docs/reference/wire/nodes.md#registration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from corral.contract.budget import ceiling_bytes, parse_budget
from corral.contract.hardware import capability_of
from corral.contract.labels import auto_labels, check_labels
from corral.contract.messages.nodes import NodeType, RegisterNode
from corral.controller.registry.addresses import check_address
from corral.controller.registry.sanitize import MAX_SENTENCE, sanitize_devices, sanitize_text
from corral.kit.errors import Invalid

_SIZES = ("total_vram", "available_vram", "total_ram", "available_ram", "total_disk", "available_disk")
MAX_LABELS = 128


@dataclass(frozen=True)
class AdminChoices:
    """What a person set on the node and a registration must not undo."""

    max_replicas_per_model: int | None = None
    vram_budget: str | None = None


def check_offer(offer: RegisterNode) -> None:
    """In the contract's order: node type, name, address, lengths."""
    if offer.node_type not in ("", *(kind.value for kind in NodeType)):
        raise Invalid(f"invalid node_type {offer.node_type[:50]!r}: use backend or agent")
    if not offer.name:
        raise Invalid("name is required")
    needs_address = offer.node_type != NodeType.AGENT and offer.ingress is None
    if needs_address and not offer.address:
        raise Invalid("address is required for backend nodes")
    for what, text, longest in (
        ("name", offer.name, 255),
        ("address", offer.address, 255),
        ("http_address", offer.http_address, 512),
    ):
        if len(text) > longest:
            raise Invalid(f"{what} is longer than {longest} characters")
    if not offer.name.isprintable():  # it is shown on terminals and pages, and stands in log lines
        raise Invalid("name must not hold control characters")
    if offer.name.startswith("-"):  # `corral nodes approve --all-pending` must mean one thing only
        raise Invalid("name must not begin with a hyphen")
    if "/" in offer.name or offer.name in (".", ".."):  # it is one segment of paths: /nodes/NAME
        raise Invalid("name must not be . or .. or contain a slash")
    check_address("address", offer.address)
    check_address("http_address", offer.http_address)
    if offer.ingress is not None and not 0 < offer.ingress.port < 65536:
        raise Invalid("ingress.port must be between 1 and 65535")
    if not 0 <= offer.protocol < 2**31 or offer.max_replicas_per_model >= 2**31:
        raise Invalid("protocol and max_replicas_per_model must be small numbers")
    if any(not 0 <= getattr(offer, size) < 2**63 for size in _SIZES):
        raise Invalid("sizes must be between 0 and 2^63 bytes")


def node_columns(offer: RegisterNode, *, known: bool, chosen: AdminChoices) -> dict[str, Any]:
    """Columns to write. A node that comes back keeps what it does not tell, as the contract has it; disk and budget
    are written always, and a person's own choices are never touched."""
    os, _, arch = sanitize_text(offer.platform).partition("/")
    columns: dict[str, Any] = {
        "node_type": offer.node_type or NodeType.BACKEND.value,
        "http_address": offer.http_address,
        "total_vram": offer.total_vram,
        "total_ram": offer.total_ram,
        "available_ram": offer.available_ram,
        "gpu_vendor": sanitize_text(offer.gpu_vendor),
        "gpu_compute_capability": sanitize_text(offer.gpu_compute_capability),
        "capability": sanitize_text(capability_of(offer.capability, offer.gpu_vendor, offer.total_vram)),
        "os": os,
        "arch": arch,
        "python": sanitize_text(offer.python),
        "devices": sanitize_devices(offer.devices),
        "boot_id": sanitize_text(offer.boot_id),
        "version": sanitize_text(offer.version),
    }
    columns = {name: value for name, value in columns.items() if value or not known}
    columns |= {"protocol": offer.protocol, "total_disk": offer.total_disk, "available_disk": offer.available_disk}
    columns |= {  # a warning that is no longer reported is over
        "backend_user": sanitize_text(offer.backend_user),
        "backend_user_warning": sanitize_text(offer.backend_user_warning, MAX_SENTENCE),
        "backend_user_fix": sanitize_text(offer.backend_user_fix, MAX_SENTENCE),
    }
    if chosen.max_replicas_per_model is None:
        columns["max_replicas_per_model"] = max(1, offer.max_replicas_per_model)
    return columns | budget_columns(offer, chosen)


def budget_columns(offer: RegisterNode, chosen: AdminChoices) -> dict[str, Any]:
    """A worker's unreadable budget means no cap, as the contract has it; a person's was checked when it was set."""
    text = offer.vram_budget if chosen.vram_budget is None else chosen.vram_budget
    try:
        ceiling = ceiling_bytes(parse_budget(text), offer.total_vram)
    except ValueError:
        text, ceiling = "", None
    available = offer.available_vram if ceiling is None else min(offer.available_vram, ceiling)
    columns: dict[str, Any] = {"available_vram": available, "vram_budget_bytes": ceiling or 0}
    if chosen.vram_budget is None:
        columns["vram_budget"] = text
    return columns


def worker_labels(offer: RegisterNode) -> dict[str, str]:
    """The worker's own labels; one that breaks the rules is refused with its name."""
    if len(offer.labels) > MAX_LABELS:
        raise Invalid(f"{len(offer.labels)} labels are too many; at most {MAX_LABELS} are allowed")
    try:
        check_labels(offer.labels)
    except ValueError as error:
        raise Invalid(str(error)) from error
    return dict(offer.labels)


def labels_we_add(offer: RegisterNode, max_replicas: int) -> dict[str, str]:
    return auto_labels(
        node_name=offer.name,
        gpu_vendor=sanitize_text(offer.gpu_vendor),
        total_vram=offer.total_vram,
        max_replicas_per_model=max_replicas,
        platform=sanitize_text(offer.platform),
    )
