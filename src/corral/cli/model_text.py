"""Models in words, and definitions as people write them. Pure; `models.py` prints it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from corral.cli.output import ago, size
from corral.contract.catalogue import AvailableModel, ModelView, ScheduleView
from corral.contract.labels import selector_of_map
from corral.kit.lines import in_short
from corral.kit.yaml_text import as_yaml as as_yaml

AVAILABLE_COLUMNS = ("NAME", "BACKEND", "SIZE", "GALLERY", "INSTALLED", "DESCRIPTION")
COLUMNS = ("MODEL", "BACKEND", "READY", "WANTED", "SIZE", "FROM", "NOTE")
REPLICA_COLUMNS = ("MODEL", "NODE", "REPLICA", "STATE", "IN FLIGHT", "MEMORY", "DEVICES", "USED", "NOTE")
_DESCRIPTION = 70  # characters of it in a table


def available_row(entry: AvailableModel) -> tuple[str, ...]:
    installed = "yes" if entry.installed else ""
    return entry.name, entry.backend, entry.size, entry.gallery, installed, _shortened(entry.description)


def model_row(model: ModelView) -> tuple[str, ...]:
    return (
        model.id,
        model.backend,
        "" if model.alias else str(model.ready),
        wanted(model.schedule),
        size(model.size_bytes) if model.size_bytes else "",
        came_from(model),
        note(model),
    )


def replica_row(row: Mapping[str, Any]) -> tuple[str, ...]:
    """A replica row (docs/reference/wire/http-nodes.md#replica-row)."""
    gone = row.get("process_state") == "node offline"
    waits = row.get("process_state") in ("", "ready") or (row.get("state") != "loaded" and not gone)
    return (
        str(row.get("model_name", "")),
        str(row.get("node_name") or row.get("node_id", "")),
        str(row.get("replica_index", "")),
        str(row.get("state" if waits else "process_state", "")),
        str(row.get("in_flight", "")),
        size(row["memory_bytes"]) if row.get("memory_bytes") else "",
        ", ".join(str(device) for device in row.get("devices") or ()),
        ago(str(row.get("last_used", ""))),
        in_short(str(row.get("error") or (row.get("reason") if row.get("state") == "unloading" else "") or "")),
    )


def came_from(model: ModelView) -> str:
    if model.origin == "file":
        return f"file {model.source.partition('/')[2]}"  # before it stands which folder
    return model.source or model.created_by or model.origin


def note(model: ModelView) -> str:
    words = [f"stands for {model.alias}"] if model.alias else []
    words += ["disabled"] if model.disabled else []
    words += ["pinned"] if model.pinned else []
    return ", ".join(words)


def wanted(schedule: ScheduleView | None) -> str:
    """How many replicas somebody asked for."""
    if schedule is None:
        return ""
    if schedule.spread_all:
        many = "every node"
    elif schedule.min_replicas == schedule.max_replicas:
        many = str(schedule.min_replicas) if schedule.min_replicas else "as needed"
    else:
        many = f"{schedule.min_replicas}–{schedule.max_replicas or '∞'}"
    return many + (" (cannot be had now)" if schedule.unsatisfiable_until else "")


def details(model: ModelView | AvailableModel) -> Iterator[tuple[str, str]]:
    return _entry_details(model) if isinstance(model, AvailableModel) else _model_details(model)


def _model_details(model: ModelView) -> Iterator[tuple[str, str]]:
    yield "model", model.id
    yield "stands for", model.alias
    yield "description", " ".join(model.description.split())
    yield "backend", model.backend
    yield "context", str(model.context_size or "")
    yield "files", f"{model.files}, {size(model.size_bytes)}" if model.size_bytes else str(model.files or "")
    yield "ready", "" if model.alias else str(model.ready)
    yield "note", note(model) if not model.alias else ""
    if model.schedule is not None:
        yield "wanted", wanted(model.schedule)
        yield "on nodes with", _selector(model.schedule)
        yield "routing", model.schedule.route_policy
    yield "from", came_from(model)
    yield "made", f"{ago(model.created_at)}{' by ' + model.created_by if model.created_by else ''}"
    yield "changed", ago(model.updated_at) if model.updated_at != model.created_at else ""
    yield "revision", model.config_revision[:12]


def _entry_details(entry: AvailableModel) -> Iterator[tuple[str, str]]:
    """Of a gallery's entry that is not installed."""
    yield "model", entry.name
    yield "description", " ".join(entry.description.split())
    yield "backend", entry.backend
    yield "files", ", ".join(part for part in (str(entry.files or ""), entry.size) if part)
    yield "license", entry.license
    yield "variants", ", ".join(entry.variants)
    yield "from", entry.id
    yield "installed", f"no: `corral models install {entry.id}`"


def _selector(schedule: ScheduleView) -> str:
    """As `--selector` takes it."""
    if not schedule.node_selector:
        return ""
    return str(selector_of_map(msgspec.json.decode(schedule.node_selector, type=dict[str, str])))


def documents(text: str) -> list[str]:
    """Each definition of a file as a document of its own, as it was written: what its words mean the controller says,
    and it explains what cannot be read. Raises ValueError where a list holds anything else: it would be passed over."""
    import yaml

    try:
        read = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError:
        return [text]
    if not isinstance(read, yaml.SequenceNode):
        return [text]
    if not read.value:
        raise ValueError("it is a list without a definition in it")
    for number, item in enumerate(read.value, 1):
        if not isinstance(item, yaml.MappingNode):
            raise ValueError(f"entry {number} is not a definition, a mapping of keys to values")
    return [str(yaml.serialize(item, Dumper=yaml.SafeDumper, allow_unicode=True)) for item in read.value]


def changes_of(given: Sequence[str], removed: Sequence[str]) -> dict[str, Any]:
    """`parameters.temperature=0.2` and keys to take away, as one nested mapping. Raises ValueError."""
    changes: dict[str, Any] = {}
    for text in given:
        path, equals, value = text.partition("=")
        if not equals or not path.strip():
            raise ValueError(f"{text!r}: write key=value; parameters.temperature=0.2 reaches inside")
        _place(changes, path.strip(), _value(value))
    for path in removed:
        _place(changes, path.strip(), None)
    return changes


def _place(changes: dict[str, Any], path: str, value: object) -> None:
    *outer, last = path.split(".")
    inside = changes
    for key in outer:
        below = inside.setdefault(key, {})
        if not isinstance(below, dict):
            raise ValueError(f"{path}: {key} has a value of its own already")
        inside = below
    inside[last] = value


def _value(text: str) -> object:
    """As YAML has it: 0.2, true, [a, b]; anything else is text."""
    import yaml

    try:
        return yaml.safe_load(text) if text.strip() else ""
    except yaml.YAMLError:
        return text


def _shortened(text: str) -> str:
    words = " ".join(text.split())
    return words if len(words) <= _DESCRIPTION else words[: _DESCRIPTION - 1] + "…"
