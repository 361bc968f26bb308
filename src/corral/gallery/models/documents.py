"""YAML documents with definitions of models: one mapping, or a list of them
(docs/reference/wire/gallery.md#model-definition). Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from corral.contract.models import Definition, read_definition
from corral.gallery.index import label_of
from corral.gallery.yaml_items import LIMITS, Limits, Problem, read_items
from corral.kit.errors import Invalid

MAX_DEFINITION_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Document:
    definitions: tuple[Definition, ...]
    problems: tuple[Problem, ...]  # of the ignored ones


def read_document(body: bytes, limits: Limits = LIMITS) -> Document:
    """Every usable definition, and a reason for each that is not. Raises Invalid if the body is not YAML."""
    read = read_items(body, limits, typed=True, single=True, exact=True)
    problems = list(read.problems)
    found: dict[str, Definition] = {}
    for item in read.items:
        label = label_of(item)
        try:
            definition = read_definition(item.value)
        except Invalid as error:
            problems.append(Problem(item.line, error.message, label))
            continue
        if definition.name in found:
            problems.append(Problem(item.line, "an earlier model has the same name; this one is ignored", label))
        else:
            found[definition.name] = definition
    return Document(tuple(found.values()), tuple(sorted(problems, key=lambda problem: problem.line)))


def read_mapping(body: bytes, limits: Limits = LIMITS, *, exact: bool = False) -> dict[str, Any]:
    """Read one mapping. Raises Invalid for anything else; an empty body is an empty mapping. `exact`: repeated keys are
    errors, for input that users wrote."""
    if len(body) > MAX_DEFINITION_BYTES:
        raise Invalid(f"the definition has more than {MAX_DEFINITION_BYTES} bytes")
    read = read_items(body, limits, typed=True, single=True, exact=exact)
    if read.problems:
        raise Invalid(f"line {read.problems[0].line}: {read.problems[0].reason}")
    if len(read.items) > 1:
        raise Invalid("write one definition, not a list of several")
    return dict(read.items[0].value) if read.items else {}
