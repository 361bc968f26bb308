"""YAML with definitions of models in it: one mapping, or a list of them
(docs/reference/wire/gallery.md#model-definition). Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from corral.contract.models import Definition, read_definition
from corral.gallery.yaml_items import LIMITS, Limits, Problem, read_items
from corral.kit.errors import Invalid

MOST_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Document:
    definitions: tuple[Definition, ...]
    problems: tuple[Problem, ...]  # of those that were left out


def read_document(body: bytes, limits: Limits = LIMITS) -> Document:
    """Every definition that can be used, and a reason for each that cannot. Raises Invalid when it is not YAML."""
    read = read_items(body, limits, typed=True, single=True, exact=True)
    problems = list(read.problems)
    found: dict[str, Definition] = {}
    for item in read.items:
        label = _label(item.value)
        try:
            definition = read_definition(item.value)
        except Invalid as error:
            problems.append(Problem(item.line, error.message, label))
            continue
        if definition.name in found:
            problems.append(Problem(item.line, "there is a model of this name above; that one counts", label))
        else:
            found[definition.name] = definition
    return Document(tuple(found.values()), tuple(sorted(problems, key=lambda problem: problem.line)))


def read_mapping(body: bytes, limits: Limits = LIMITS, *, exact: bool = False) -> dict[str, Any]:
    """One mapping, whatever it means. Raises Invalid for anything else; nothing at all is an empty one. `exact`: people
    here wrote it, and nothing they said may be passed over."""
    if len(body) > MOST_BYTES:
        raise Invalid(f"a definition has at most {MOST_BYTES} bytes")
    read = read_items(body, limits, typed=True, single=True, exact=exact)
    if read.problems:
        raise Invalid(f"line {read.problems[0].line}: {read.problems[0].reason}")
    if len(read.items) > 1:
        raise Invalid("write one definition, not a list of several")
    return dict(read.items[0].value) if read.items else {}


def _label(value: dict[str, Any]) -> str:
    name = value.get("name")
    return name[:200] if isinstance(name, str) else ""
