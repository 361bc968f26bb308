"""Makes a definition from an entry and its base document (docs/reference/wire/gallery.md#model-entry). Pure.

LocalAI stores files and templates next to the definition on a disk. Corral puts them into the definition: files into
`download_files`, templates in place of their names. So a definition is complete on any controller.
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

_DISPLAY_KEYS = ("description", "license", "icon", "urls", "tags")


class PromptTemplate(Message, frozen=True):
    name: str = ""
    content: str = ""


class _RawBase(Message, frozen=True):
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
    """A base document, which an entry extends and overrides."""

    config: Mapping[str, Any]
    files: tuple[File, ...] = ()
    templates: tuple[PromptTemplate, ...] = ()
    display: Mapping[str, Any] | None = None


def read_base(body: bytes) -> Base:
    """Parse a base document. Raises Invalid."""
    whole = read_mapping(body)
    try:
        written = msgspec.convert(whole, type=_RawBase, strict=False)
    except msgspec.ValidationError as error:
        raise Invalid(f"the base document is not valid: {error}") from error
    config = written.config_file
    return Base(
        config=read_mapping(config.encode()) if isinstance(config, str) else config,
        files=written.files,
        templates=written.prompt_templates,
        display={key: whole[key] for key in _DISPLAY_KEYS if whole.get(key)},
    )


def make_definition(
    entry: ModelEntry, base: Base | None, *, name: str = "", overrides: Mapping[str, Any] | None = None
) -> Definition:
    """`name`: the model's name, if it differs from the gallery's. Raises Invalid if the result is not valid."""
    whole: dict[str, Any] = dict(base.display or {}) if base is not None else {}
    whole |= {key: value for key in _DISPLAY_KEYS if (value := _plain(getattr(entry, key)))}
    for layer in (base.config if base is not None else {}, {} if entry.url else entry.config_file, entry.overrides):
        whole = merged(whole, layer)
    files = _files((*(base.files if base is not None else ()), *entry.files))
    if files:
        whole["download_files"] = _joined(whole.get("download_files"), files)
    if base is not None and base.templates:
        _inline_templates(whole, base.templates)
    whole = merged(whole, overrides or {})
    whole["name"] = name or entry.name
    return read_definition(whole)


def merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Nested mappings are merged, all other values are replaced; None removes a key."""
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


def is_contained(changes: Mapping[str, Any], definition: Mapping[str, Any]) -> bool:
    """Whether the definition says all of this already."""
    return merged(definition, changes) == definition


def _files(files: Sequence[File]) -> list[dict[str, Any]]:
    return [
        {key: value for key in ("filename", "uri", "sha256", "size") if (value := getattr(file, key))}
        for file in files
        if file.filename or file.uri
    ]


def _joined(there: object, more: list[dict[str, Any]]) -> list[Any]:
    """Of two files with one name the later one counts."""
    named = {file.get("filename") for file in more}
    kept = (
        [file for file in there if not (isinstance(file, Mapping) and file.get("filename") in named)]
        if isinstance(there, list)
        else []
    )
    unique = {file.get("filename") or file["uri"]: file for file in more}
    return [*kept, *unique.values()]


def _inline_templates(whole: dict[str, Any], templates: Sequence[PromptTemplate]) -> None:
    """Replace the names in `template: {chat: name}` by the templates: there are no template files."""
    texts = {template.name: template.content for template in templates if template.name}
    named = whole.get("template")
    if isinstance(named, Mapping):
        whole["template"] = {
            key: texts.get(value, value) if isinstance(value, str) else value for key, value in named.items()
        }


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value
