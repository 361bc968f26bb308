"""From an entry and its base document to a definition (docs/reference/wire/gallery.md#model-entry). Pure.

Ours keeps in the definition what LocalAI puts beside it on a disk: files go into `download_files`, templates are
written out where they are named. So a definition is all there is to know, on any controller.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from corral.contract.codec import Message
from corral.contract.models import Definition, read_definition
from corral.gallery.models.documents import read_mapping
from corral.gallery.models.entries import File, ModelEntry
from corral.kit.errors import Invalid

_SHOWN = ("description", "license", "icon", "urls", "tags")


class PromptTemplate(Message, frozen=True):
    name: str = ""
    content: str = ""


class _WrittenBase(Message, frozen=True):
    name: str = ""
    description: str = ""
    license: str = ""
    icon: str = ""
    urls: tuple[str, ...] = ()
    config_file: str | dict[str, Any] = ""
    files: tuple[File, ...] = ()
    prompt_templates: tuple[PromptTemplate, ...] = ()


@dataclass(frozen=True, slots=True)
class Base:
    """What an entry is laid over."""

    config: Mapping[str, Any]
    files: tuple[File, ...] = ()
    templates: tuple[PromptTemplate, ...] = ()
    shown: Mapping[str, Any] | None = None


def read_base(body: bytes) -> Base:
    """A base document. Raises Invalid."""
    whole = read_mapping(body)
    try:
        written = msgspec.convert(whole, type=_WrittenBase, strict=False)
    except msgspec.ValidationError as error:
        raise Invalid(f"the base document is not one: {error}") from error
    config = written.config_file
    return Base(
        config=read_mapping(config.encode()) if isinstance(config, str) else config,
        files=written.files,
        templates=written.prompt_templates,
        shown={key: whole[key] for key in _SHOWN if whole.get(key)},
    )


def make_definition(
    entry: ModelEntry, base: Base | None, *, name: str = "", overrides: Mapping[str, Any] | None = None
) -> Definition:
    """`name`: what it shall be called here, when not as in the gallery. Raises Invalid where nothing can come of it."""
    whole: dict[str, Any] = dict(base.shown or {}) if base is not None else {}
    whole |= {key: value for key in _SHOWN if (value := _plain(getattr(entry, key)))}
    for layer in (base.config if base is not None else {}, {} if entry.url else entry.config_file, entry.overrides):
        whole = merged(whole, layer)
    files = _files((*(base.files if base is not None else ()), *entry.files))
    if files:
        whole["download_files"] = _joined(whole.get("download_files"), files)
    if base is not None and base.templates:
        _write_out(whole, base.templates)
    whole = merged(whole, overrides or {})
    whole["name"] = name or entry.name
    return read_definition(whole)


def merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Mappings within mappings are merged, everything else is replaced; None takes a key away."""
    result = dict(under)
    for key, value in over.items():
        below = result.get(key)
        if value is None:
            result.pop(key, None)
        elif isinstance(value, Mapping) and isinstance(below, Mapping):
            result[key] = merged(below, value)
        else:
            result[key] = merged({}, value) if isinstance(value, Mapping) else value
    return result


def _files(files: Sequence[File]) -> list[dict[str, Any]]:
    return [
        {key: value for key in ("filename", "uri", "sha256", "size") if (value := getattr(file, key))}
        for file in files
        if file.filename or file.uri
    ]


def _joined(there: object, more: list[dict[str, Any]]) -> list[Any]:
    """A later file of the same name is the one that counts."""
    named = {file.get("filename") for file in more}
    kept = (
        [file for file in there if not (isinstance(file, Mapping) and file.get("filename") in named)]
        if isinstance(there, list)
        else []
    )
    unique = {file.get("filename") or file["uri"]: file for file in more}
    return [*kept, *unique.values()]


def _write_out(whole: dict[str, Any], templates: Sequence[PromptTemplate]) -> None:
    """`template: {chat: name}` becomes the template itself: there is no file of that name beside us."""
    texts = {template.name: template.content for template in templates if template.name}
    named = whole.get("template")
    if isinstance(named, Mapping):
        whole["template"] = {
            key: texts.get(value, value) if isinstance(value, str) else value for key, value in named.items()
        }


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value
