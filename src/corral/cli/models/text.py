"""Models and replicas as text, and model definitions as YAML. Pure; `commands.py` and `replicas.py` print it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from corral.cli.common.output import relative_time
from corral.kit.humanize import first_and_last_line, format_bytes

if TYPE_CHECKING:
    from corral.contract.catalogue import AvailableModel, ModelView, ScheduleView

AVAILABLE_COLUMNS = ("NAME", "BACKEND", "SIZE", "FITS ON", "GALLERY", "INSTALLED", "DESCRIPTION")
COLUMNS = ("MODEL", "BACKEND", "READY", "WANTED", "SIZE", "FROM", "NOTE")
REPLICA_COLUMNS = ("MODEL", "NODE", "REPLICA", "STATE", "IN FLIGHT", "MEMORY", "DEVICES", "USED", "NOTE")
NO_MODELS = "No models yet. `corral models available` lists names; install one: `corral models install NAME`"
NO_REPLICAS = "No replicas."
MAX_DESCRIPTION = 70  # characters in a table
MAX_NODES = 3  # in a table


def available_row(entry: AvailableModel) -> tuple[str, ...]:
    installed = "yes" if entry.installed else ""
    fits = fits_on(entry)
    return entry.name, entry.backend, entry.size, fits, entry.gallery, installed, _shortened(entry.description)


def fits_on(entry: AvailableModel) -> str:
    """Of a built-in model: the nodes that can hold it."""
    more = len(entry.fits_on) - MAX_NODES
    if entry.fits_on:
        return ", ".join(entry.fits_on[:MAX_NODES]) + (f" and {more} more" if more > 0 else "")
    return "no node" if entry.size_bytes else ""


def model_row(model: ModelView) -> tuple[str, ...]:
    return (
        model.id,
        model.backend,
        "" if model.alias else str(model.ready),
        wanted(model.schedule),
        format_bytes(model.size_bytes) if model.size_bytes else "",
        came_from(model),
        note(model),
    )


def replica_row(row: Mapping[str, Any], now: datetime | None = None) -> tuple[str, ...]:
    """A replica row (docs/reference/wire/http-nodes.md#replica-row)."""
    gone = row.get("process_state") == "node offline"
    waits = row.get("process_state") in ("", "ready") or (row.get("state") != "loaded" and not gone)
    return (
        str(row.get("model_name", "")),
        str(row.get("node_name") or row.get("node_id", "")),
        str(row.get("replica_index", "")),
        str(row.get("state" if waits else "process_state", "")),
        str(row.get("in_flight", "")),
        format_bytes(row["memory_bytes"]) if row.get("memory_bytes") else "",
        ", ".join(str(device) for device in row.get("devices") or ()),
        relative_time(str(row.get("last_used", "")), now),
        first_and_last_line(
            str(row.get("error") or (row.get("reason") if row.get("state") == "unloading" else "") or "")
        ),
    )


def came_from(model: ModelView) -> str:
    if model.origin == "file":
        return f"file {model.source.partition('/')[2]}"  # the part before the slash names the folder
    return model.source or model.created_by or model.origin


def note(model: ModelView) -> str:
    words = [f"alias of {model.alias}"] if model.alias else []
    words += ["disabled"] if model.disabled else []
    words += ["pinned"] if model.pinned else []
    return ", ".join(words)


def wanted(schedule: ScheduleView | None) -> str:
    """The number of replicas that the schedule requests."""
    if schedule is None:
        return ""
    if schedule.spread_all:
        many = "every node"
    elif schedule.min_replicas == schedule.max_replicas:
        many = str(schedule.min_replicas) if schedule.min_replicas else "as needed"
    else:
        many = f"{schedule.min_replicas}–{schedule.max_replicas or '∞'}"
    return many + (" (cannot be placed now)" if schedule.unsatisfiable_until else "")


def details(model: ModelView | AvailableModel) -> Iterator[tuple[str, str]]:
    from corral.contract.catalogue import AvailableModel

    return _entry_details(model) if isinstance(model, AvailableModel) else _model_details(model)


def _model_details(model: ModelView) -> Iterator[tuple[str, str]]:
    yield "model", model.id
    yield "alias of", model.alias
    yield "description", " ".join(model.description.split())
    yield "backend", model.backend
    yield "context", str(model.context_size or "")
    yield "files", f"{model.files}, {format_bytes(model.size_bytes)}" if model.size_bytes else str(model.files or "")
    yield "ready", "" if model.alias else str(model.ready)
    yield "note", note(model) if not model.alias else ""
    if model.schedule is not None:
        yield "wanted", wanted(model.schedule)
        yield "on nodes with", _selector(model.schedule)
        yield "routing", model.schedule.route_policy
    yield "from", came_from(model)
    yield "created", f"{relative_time(model.created_at)}{' by ' + model.created_by if model.created_by else ''}"
    yield "changed", relative_time(model.updated_at) if model.updated_at != model.created_at else ""
    yield "revision", model.config_revision[:12]


def _entry_details(entry: AvailableModel) -> Iterator[tuple[str, str]]:
    """Details of a gallery entry that is not installed."""
    yield "model", entry.name
    yield "description", " ".join(entry.description.split())
    yield "backend", entry.backend
    yield "files", ", ".join(part for part in (str(entry.files or ""), entry.size) if part)
    yield "fits", f"on {', '.join(entry.fits_on)}" if entry.fits_on else entry.fit_note.removeprefix("fits ")
    yield "license", entry.license
    yield "variants", ", ".join(entry.variants)
    yield "from", entry.id
    yield "installed", f"no: `corral models install {entry.id}`"


def _selector(schedule: ScheduleView) -> str:
    """The selector in the form of the option --selector."""
    if not schedule.node_selector:
        return ""
    import msgspec  # here, as above: the table of the models needs none of the types

    from corral.contract.labels import selector_of_map

    return str(selector_of_map(msgspec.json.decode(schedule.node_selector, type=dict[str, str])))


def documents(text: str) -> list[str]:
    """Split a file into one document per definition, unchanged: the controller reads and checks them. Raises ValueError
    if a list contains something other than definitions, which would otherwise be skipped."""
    import yaml

    try:
        read = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError:
        return [text]
    if not isinstance(read, yaml.SequenceNode):
        return [text]
    if not read.value:
        raise ValueError("the list contains no definition")
    for number, item in enumerate(read.value, 1):
        if not isinstance(item, yaml.MappingNode):
            raise ValueError(f"entry {number} is not a definition (a mapping of keys to values)")
    return [str(yaml.serialize(item, Dumper=yaml.SafeDumper, allow_unicode=True)) for item in read.value]


def changes_of(given: Sequence[str], removed: Sequence[str]) -> dict[str, Any]:
    """`parameters.temperature=0.2` and keys to remove, as one nested mapping. Raises ValueError."""
    changes: dict[str, Any] = {}
    for text in given:
        path, equals, value = text.partition("=")
        if not equals or not path.strip():
            raise ValueError(f"{text!r} is not KEY=VALUE, such as parameters.temperature=0.2")
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
            raise ValueError(f"{path}: {key} already has a value")
        inside = below
    inside[last] = value


def _value(text: str) -> object:
    """The value as YAML reads it (0.2, true, [a, b]), or the text itself."""
    import yaml

    try:
        return yaml.safe_load(text) if text.strip() else ""
    except yaml.YAMLError:
        return text


def _shortened(text: str) -> str:
    words = " ".join(text.split())
    return words if len(words) <= MAX_DESCRIPTION else words[: MAX_DESCRIPTION - 1] + "…"
