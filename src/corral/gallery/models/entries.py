"""Entries of models, parsing an index, and the built-in models (docs/reference/wire/gallery.md#model-entry). Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from types import MappingProxyType
from typing import Any, TypeAlias

import msgspec

from corral.contract.codec import Message
from corral.contract.models import check_model_name
from corral.gallery.galleries import BUILT_IN, Gallery
from corral.gallery.index import Index, is_web_link, make_index
from corral.gallery.yaml_items import LIMITS, Item, Limits, read_items
from corral.kit.errors import Invalid

_Strings: TypeAlias = "tuple[str, ...]"


class File(Message, frozen=True):
    """`files` of an entry or of a base document."""

    filename: str = ""
    uri: str = ""
    sha256: str = ""
    size: int = 0  # Corral's addition: bytes, for placement


class Variant(Message, frozen=True):
    model: str = ""


class _RawModelEntry(Message, frozen=True):
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
    size: str = ""  # as written: 4.5GB
    url: str = ""  # of the base document; empty: `config_file` is the base
    config_file: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    overrides: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    files: tuple[File, ...] = ()
    variants: tuple[str, ...] = ()  # names of alternative entries of the same gallery

    @property
    def id(self) -> str:
        return f"{self.gallery.name}@{self.name}"

    @property
    def backend(self) -> str:
        """The backend, as far as the entry itself names it; the base document may name another."""
        for source in (self.overrides, self.config_file):
            if isinstance(named := source.get("backend"), str) and named:
                return named
        weights = [file.filename for file in self.files]
        return "llama-cpp" if any(name.lower().endswith(".gguf") for name in weights) else ""


ModelIndex = Index[ModelEntry]


def read_model_index(gallery: Gallery, body: bytes, limits: Limits = LIMITS) -> ModelIndex:
    """Every usable entry, and a reason for each that is not. Raises Invalid if the body is not a list at all."""
    return make_index(
        gallery, read_items(body, limits, typed=True), lambda gallery, item: (_parse_entry(gallery, item), ())
    )


def _parse_entry(gallery: Gallery, item: Item) -> ModelEntry:
    try:
        # Texts that look like numbers were parsed as numbers: `license: 1.0`, `tags: [7]`.
        written = msgspec.convert(_texts(item.value), type=_RawModelEntry, strict=False)
    except msgspec.ValidationError as error:
        raise Invalid(str(error)) from error
    check_model_name(written.name)
    if "@" in written.name:
        raise Invalid(f"{written.name[:64]!r}: a name must not contain @")
    return ModelEntry(
        gallery=gallery,
        name=written.name,
        description=written.description.strip(),
        license=written.license,
        icon=written.icon if is_web_link(written.icon) else "",
        urls=tuple(filter(is_web_link, written.urls)),
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
    """Convert the values of text fields to text."""
    converted = dict(value)
    for key in _TEXT_KEYS:
        if isinstance(converted.get(key), int | float):
            converted[key] = str(converted[key])
    for key in _LIST_KEYS:
        if isinstance(converted.get(key), list):
            converted[key] = [str(item) for item in converted[key] if isinstance(item, str | int | float)]
        elif isinstance(converted.get(key), str):
            converted[key] = [converted[key]]
    return converted


def read_built_in_models() -> ModelIndex:
    """The models of the built-in gallery. Raises if the installed package is damaged."""
    return read_model_index(BUILT_IN, files("corral.gallery.models").joinpath("builtin.yaml").read_bytes())
