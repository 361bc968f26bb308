"""What a registration says, made into what is stored. Pure: validation order and merge rules of contract http.md §2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from corral.contract.budget import ceiling_bytes, parse_budget
from corral.contract.capability import capability_of
from corral.contract.labels import auto_labels, check_labels
from corral.contract.messages.nodes import NodeType, RegisterNode
from corral.kit.errors import Invalid


@dataclass(frozen=True)
class AdminChoices:
    """What a person set on the node and a registration must not undo."""

    max_replicas_per_model: int | None = None
    vram_budget: str | None = None


def check_offer(offer: RegisterNode) -> None:
    """In the contract's order: node type, name, address, lengths."""
    if offer.node_type not in ("", *(kind.value for kind in NodeType)):
        raise Invalid(f"invalid node_type {offer.node_type!r}: use backend or agent")
    if not offer.name:
        raise Invalid("name is required")
    needs_address = offer.node_type != NodeType.AGENT and offer.ingress is None
    if needs_address and not offer.address:
        raise Invalid("address is required for backend nodes")
    if len(offer.name) > 255:
        raise Invalid("name is longer than 255 characters")
    if len(offer.address) > 255 or len(offer.http_address) > 512:
        raise Invalid(
            "address is longer than 255 characters" if len(offer.address) > 255 else "http_address is too long"
        )
    if any(ord(letter) < 32 for letter in offer.name + offer.address + offer.http_address):
        raise Invalid("names and addresses must not hold control characters")
    if offer.ingress is not None and not 0 < offer.ingress.port < 65536:
        raise Invalid("ingress.port must be between 1 and 65535")
    for number in (offer.total_vram, offer.total_ram, offer.total_disk, offer.available_vram, offer.available_ram):
        if not 0 <= number < 2**63:
            raise Invalid("sizes must be between 0 and 2^63 bytes")


def node_columns(offer: RegisterNode, *, known: bool, chosen: AdminChoices) -> dict[str, Any]:
    """Columns to write. A node that comes back keeps what it does not tell, as the contract has it; disk and budget
    are written always, and a person's own choices are never touched."""
    os, _, arch = offer.platform.partition("/")
    told: dict[str, Any] = {
        "node_type": offer.node_type or NodeType.BACKEND.value,
        "http_address": offer.http_address,
        "total_vram": offer.total_vram,
        "total_ram": offer.total_ram,
        "available_ram": offer.available_ram,
        "gpu_vendor": offer.gpu_vendor,
        "gpu_compute_capability": offer.gpu_compute_capability,
        "capability": capability_of(offer.capability, offer.gpu_vendor, offer.total_vram),
        "os": os,
        "arch": arch,
        "devices": offer.devices,
        "boot_id": offer.boot_id,
        "version": offer.version,
    }
    columns = {name: value for name, value in told.items() if value or not known}
    columns |= {"protocol": offer.protocol, "total_disk": offer.total_disk, "available_disk": offer.available_disk}
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
    try:
        check_labels(offer.labels)
    except ValueError as error:
        raise Invalid(str(error)) from error
    return dict(offer.labels)


def labels_we_add(offer: RegisterNode, max_replicas: int) -> dict[str, str]:
    return auto_labels(
        node_name=offer.name,
        gpu_vendor=offer.gpu_vendor,
        total_vram=offer.total_vram,
        max_replicas_per_model=max_replicas,
        platform=offer.platform,
    )
