"""A model as an index has it, and reading an index (docs/reference/wire/gallery.md#model-entry). Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeAlias

import msgspec

from corral.contract.codec import Message
from corral.contract.models import check_model_name
from corral.gallery.galleries import Gallery
from corral.gallery.yaml_items import LIMITS, Item, Limits, Problem, read_items
from corral.kit.errors import Invalid

_Strings: TypeAlias = "tuple[str, ...]"


class File(Message, frozen=True):
    """`files` of an entry or of a base document."""

    filename: str = ""
    uri: str = ""
    sha256: str = ""
    size: int = 0  # ours: bytes, so that placement need not ask


class Variant(Message, frozen=True):
    model: str = ""


class _Written(Message, frozen=True):
    name: str = ""
    description: str = ""
    license: str = ""
    icon: str = ""
    urls: _Strings = ()
    tags: _Strings = ()
    size: str | int | float = ""
    url: str = ""
    config_file: dict[str, Any] = msgspec.field(default_factory=dict)
    overrides: dict[str, Any] = msgspec.field(default_factory=dict)
    files: tuple[File, ...] = ()
    variants: tuple[Variant, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEntry:
    gallery: Gallery
    name: str
    description: str = ""
    license: str = ""
    icon: str = ""
    urls: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    size: str = ""  # as it is written: 4.5GB
    url: str = ""  # of its base document; empty: `config_file` is the base
    config_file: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    overrides: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    files: tuple[File, ...] = ()
    variants: tuple[str, ...] = ()  # names of entries of the same gallery that may stand in for it

    @property
    def id(self) -> str:
        return f"{self.gallery.name}@{self.name}"

    @property
    def backend(self) -> str:
        """As far as the entry itself says; its base document may know more."""
        for source in (self.overrides, self.config_file):
            if isinstance(named := source.get("backend"), str) and named:
                return named
        weights = [file.filename for file in self.files]
        return "llama-cpp" if any(name.lower().endswith(".gguf") for name in weights) else ""


@dataclass(frozen=True, slots=True)
class ModelIndex:
    """One gallery, read."""

    gallery: Gallery
    entries: tuple[ModelEntry, ...]
    problems: tuple[Problem, ...] = ()


def read_model_index(gallery: Gallery, body: bytes, limits: Limits = LIMITS) -> ModelIndex:
    """Every entry that can be used, and a reason for each that cannot. Raises Invalid when there is no list at all."""
    read = read_items(body, limits, typed=True)
    problems = list(read.problems)
    entries: dict[str, ModelEntry] = {}
    for item in read.items:
        name = item.value.get("name")
        label = name[:200] if isinstance(name, str) else ""
        try:
            entry = _entry(gallery, item)
        except Invalid as error:
            problems.append(Problem(item.line, error.message, label))
            continue
        if entry.name.lower() in entries:
            problems.append(Problem(item.line, "there is an entry of this name above; that one counts", label))
        else:
            entries[entry.name.lower()] = entry
    return ModelIndex(gallery, tuple(entries.values()), tuple(sorted(problems, key=lambda problem: problem.line)))


def _entry(gallery: Gallery, item: Item) -> ModelEntry:
    try:
        # Texts that look like numbers were read as numbers: `license: 1.0`, `tags: [7]`.
        written = msgspec.convert(_texts(item.value), type=_Written, strict=False)
    except msgspec.ValidationError as error:
        raise Invalid(str(error)) from error
    check_model_name(written.name)
    if "@" in written.name:
        raise Invalid(f"{written.name[:64]!r}: @ parts a gallery from a name")
    return ModelEntry(
        gallery=gallery,
        name=written.name,
        description=written.description.strip(),
        license=written.license,
        icon=written.icon if _is_link(written.icon) else "",
        urls=tuple(filter(_is_link, written.urls)),
        tags=written.tags,
        size=str(written.size),
        url=written.url.strip(),
        config_file=MappingProxyType(written.config_file),
        overrides=MappingProxyType(written.overrides),
        files=written.files,
        variants=tuple(variant.model for variant in written.variants if variant.model),
    )


_TEXT_KEYS = ("name", "description", "license", "icon", "url")
_LIST_KEYS = ("urls", "tags")


def _texts(value: Mapping[str, Any]) -> dict[str, Any]:
    """What people read is text, whatever it looks like."""
    told = dict(value)
    for key in _TEXT_KEYS:
        if isinstance(told.get(key), int | float):
            told[key] = str(told[key])
    for key in _LIST_KEYS:
        if isinstance(told.get(key), list):
            told[key] = [str(item) for item in told[key] if isinstance(item, str | int | float)]
        elif isinstance(told.get(key), str):
            told[key] = [told[key]]
    return told


def _is_link(text: str) -> bool:
    """People click on it; a page must not run it."""
    return text.startswith(("https://", "http://"))
