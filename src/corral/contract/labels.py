"""Labels of a node and the selectors that pick nodes by them (docs/reference/wire/budgets-and-labels.md#labels). Pure.

    labels      tier=fast,rack=b2
    selector    tier=fast,gpu.vendor!=amd,rack      all must hold; a bare key means "has this label"

The contract's `node_selector` is a map; `selector_of_map` reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

KEY_MAX = 128
VALUE_MAX = 255
GIB = 1024**3
_VRAM_BUCKETS = ((80, "80GB+"), (48, "48GB"), (24, "24GB"), (16, "16GB"), (8, "8GB"))


def parse_labels(text: str) -> dict[str, str]:
    """`k=v,k2=v2`, blanks trimmed, empty parts skipped, the last of a repeated key wins. Raises ValueError."""
    labels = {}
    for part in _parts(text):
        key, equals, value = part.partition("=")
        if not equals:
            raise ValueError(f"{part!r} is not a label; write key=value, several separated by commas")
        labels[key.strip()] = value.strip()
    check_labels(labels)
    return labels


def check_labels(labels: Mapping[str, str]) -> None:
    """Raises ValueError naming the first label that cannot be stored."""
    for key, value in labels.items():
        check_label(key, value)


def check_label(key: str, value: str) -> None:
    if not key.strip():
        raise ValueError(f"the label with value {value[:VALUE_MAX]!r} has no key; write key=value")
    if len(key) > KEY_MAX:
        raise ValueError(f"the label key {key[:32]!r}… has {len(key)} characters; at most {KEY_MAX} are allowed")
    if len(value) > VALUE_MAX:
        raise ValueError(f"the value of label {key!r} has {len(value)} characters; at most {VALUE_MAX} are allowed")
    if any(ord(char) < 0x20 or 0x7F <= ord(char) < 0xA0 for char in key + value):
        # Such text could redraw the terminal of a user who lists the nodes, and PostgreSQL refuses NUL.
        raise ValueError(f"the label {key!r} contains control characters")


# The keys of `auto_labels`.
BUILT_IN_LABELS = frozenset(
    ("gpu.vendor", "gpu.vram", "node.name", "node.replica-slots", "platform.os", "platform.arch")
)


def auto_labels(
    *,
    node_name: str,
    gpu_vendor: str,
    total_vram: int,
    max_replicas_per_model: int,
    platform: str = "",
) -> dict[str, str]:
    """The labels every node gets after each registration. `platform` is os/arch; the labels for it are ours."""
    os, _, arch = platform.partition("/")
    labels = {
        "gpu.vendor": gpu_vendor,
        "gpu.vram": vram_bucket(total_vram),
        "node.name": node_name,
        "node.replica-slots": str(max(1, max_replicas_per_model)),
        "platform.os": os,
        "platform.arch": arch,
    }
    return {key: value for key, value in labels.items() if value}


def vram_bucket(total_vram: int) -> str:
    """The size class a selector can name; empty without VRAM."""
    if total_vram <= 0:
        return ""
    gib = total_vram // GIB
    return next((name for least, name in _VRAM_BUCKETS if gib >= least), f"{gib}GB")


class Relation(StrEnum):
    EQUALS = "="
    DIFFERS = "!="
    EXISTS = ""


@dataclass(frozen=True, slots=True)
class Term:
    key: str
    relation: Relation
    value: str = ""

    def holds(self, labels: Mapping[str, str]) -> bool:
        match self.relation:
            case Relation.EQUALS:
                return labels.get(self.key) == self.value
            case Relation.DIFFERS:  # a node without the label differs too, as people used to Kubernetes expect
                return labels.get(self.key) != self.value
            case Relation.EXISTS:
                return self.key in labels

    def __str__(self) -> str:
        return f"{self.key}{self.relation}{self.value}"


@dataclass(frozen=True, slots=True)
class Selector:
    """All terms must hold. Without terms it selects every node."""

    terms: tuple[Term, ...] = ()

    def matches(self, labels: Mapping[str, str]) -> bool:
        return all(term.holds(labels) for term in self.terms)

    def why_not(self, labels: Mapping[str, str]) -> tuple[str, ...]:
        """One line per term that does not hold: people will ask."""
        return tuple(
            f"{term}: {'has ' + repr(labels[term.key]) if term.key in labels else 'has no such label'}"
            for term in self.terms
            if not term.holds(labels)
        )

    def __str__(self) -> str:
        return ",".join(str(term) for term in self.terms)


def parse_selector(text: str) -> Selector:
    """Raises ValueError; an empty text selects everything."""
    return Selector(tuple(_parse_term(part) for part in _parts(text)))


def selector_of_map(wanted: Mapping[str, str]) -> Selector:
    """The contract's `node_selector`: every label equal."""
    return Selector(tuple(Term(key, Relation.EQUALS, value) for key, value in sorted(wanted.items())))


def _parse_term(part: str) -> Term:
    left, equals, value = part.partition("=")
    differs = bool(equals) and left.endswith("!")
    key, value = left.removesuffix("!").strip() if differs else left.strip(), value.strip()
    try:
        check_label(key, value)
    except ValueError as error:
        raise ValueError(f"{part!r} selects nothing: {error}") from None
    if not equals:
        return Term(key, Relation.EXISTS)
    return Term(key, Relation.DIFFERS if differs else Relation.EQUALS, value)


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]
