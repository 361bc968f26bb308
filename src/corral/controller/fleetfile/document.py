"""The file, read. Pure.

labels: {barn: {tier: fast}}
backends: [llama-cpp, {backend: vllm, selector: tier=fast}]
models:
  - {model: smollm2-135m, overrides: {context_size: 2048}}    # out of a gallery
  - {name: mine, backend: vllm, …}                            # a definition
schedules: [{model_name: mine, min_replicas: 2}]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from corral.contract.catalogue import InstallModel, ScheduleBody
from corral.contract.codec import Message
from corral.contract.labels import check_labels
from corral.contract.models import read_definition
from corral.controller.models.schedules import next_schedule
from corral.gallery.models.documents import read_mapping
from corral.kit.errors import Invalid

T = TypeVar("T", bound=Message)
_KEYS = ("labels", "backends", "models", "schedules")
_OF_A_GALLERY = frozenset({"model", "variant", "name", "overrides"})


class WantedBackend(Message, frozen=True, forbid_unknown_fields=True):
    """With neither node nor selector, on every node."""

    backend: str = ""
    uri: str = ""
    alias: str = ""
    node: str = ""
    selector: str = ""


@dataclass(frozen=True, slots=True)
class Document:
    labels: dict[str, dict[str, str]]
    backends: tuple[WantedBackend, ...]
    models: tuple[InstallModel, ...]
    schedules: tuple[ScheduleBody, ...]


def read_fleet(text: str, *, prune: bool = False) -> Document:
    """Raises Invalid naming the first thing that cannot be meant. `prune`: what it leaves out is to be deleted."""
    whole = read_mapping(text.encode(), exact=True)
    if prune and not whole:  # rather an export that failed than a person who wants nothing to be left
        raise Invalid("the file is empty, and all models and schedules would be deleted; `models: []` means that")
    if unknown := sorted(set(whole) - set(_KEYS)):
        raise Invalid(f"{unknown[0]!r} is none of {', '.join(_KEYS)}")
    return Document(
        labels=_labels(whole.get("labels")),
        backends=tuple(_backend(item, at) for at, item in enumerate(_list(whole, "backends"), 1)),
        models=_models(_list(whole, "models")),
        schedules=_schedules(_list(whole, "schedules")),
    )


def _list(whole: Mapping[str, Any], key: str) -> list[Any]:
    value = whole.get(key)
    if value is None:
        return []
    if not isinstance(value, list):
        raise Invalid(f"{key} is a list")
    return value


def _labels(value: object) -> dict[str, dict[str, str]]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise Invalid("labels is a mapping of nodes to their labels")
    found = {}
    for node, labels in value.items():
        if not isinstance(labels, Mapping):
            raise Invalid(f"labels of {node}: a mapping of keys to values")
        checked = {str(key): _label(node, key, value) for key, value in labels.items()}
        try:
            check_labels(checked)
        except ValueError as error:
            raise Invalid(f"labels of {node}: {error}") from error
        found[str(node)] = checked
    return found


def _label(node: str, key: str, value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if not isinstance(value, str | int | float):
        raise Invalid(f"labels of {node}: {key} is a text")
    return str(value)


def _backend(item: object, position: int) -> WantedBackend:
    wanted = (
        WantedBackend(backend=item) if isinstance(item, str) else _convert(item, WantedBackend, "backends", position)
    )
    if not wanted.backend and not wanted.uri:
        raise Invalid(f"backends, entry {position}: say which")
    if wanted.node and wanted.selector:
        raise Invalid(f"backends, entry {position}: a node or a selector, not both")
    return wanted


def _models(items: list[Any]) -> tuple[InstallModel, ...]:
    found: list[InstallModel] = []
    for position, item in enumerate(items, 1):
        where = f"models, entry {position}"
        if isinstance(item, str):
            found.append(InstallModel(model=item))
        elif not isinstance(item, Mapping):
            raise Invalid(f"{where}: a definition, or the name of a gallery's model")
        elif "model" in item:
            if odd := sorted(set(item) - _OF_A_GALLERY):
                raise Invalid(f"{where}: {odd[0]!r} goes into overrides of a gallery's model")
            found.append(_convert(item, InstallModel, "models", position))
        else:
            try:
                found.append(InstallModel(definition=read_definition(item).whole))
            except Invalid as error:
                raise Invalid(f"{where}: {error.message}") from error
        if name_of(found[-1]) in map(name_of, found[:-1]):
            raise Invalid(f"{where}: there is {name_of(found[-1])} above")
    return tuple(found)


def name_of(wanted: InstallModel) -> str:
    """What it will be called here, though its gallery may be silent."""
    return wanted.name or wanted.model.rpartition("@")[2] or read_definition(wanted.definition).name


def _schedules(items: list[Any]) -> tuple[ScheduleBody, ...]:
    found: dict[str, ScheduleBody] = {}
    for position, item in enumerate(items, 1):
        body = _schedule(item, position)
        if body.model_name in found:
            raise Invalid(f"schedules, entry {position}: {body.model_name} has one above")
        found[body.model_name] = body
    return tuple(found.values())


def _schedule(item: object, position: int) -> ScheduleBody:
    body = _convert(item, ScheduleBody, "schedules", position)
    try:
        next_schedule(None, body)
    except Invalid as error:
        raise Invalid(f"schedules, entry {position}: {error.message}") from error
    return body


def _convert(item: object, kind: type[T], key: str, position: int) -> T:
    if not isinstance(item, Mapping):
        raise Invalid(f"{key}, entry {position}: a mapping")
    if odd := sorted(set(item) - set(kind.__struct_fields__)):
        raise Invalid(f"{key}, entry {position}: nobody knows what {odd[0]!r} means")
    try:
        return msgspec.convert(dict(item), type=kind)
    except msgspec.ValidationError as error:
        raise Invalid(f"{key}, entry {position}: {error}") from error
