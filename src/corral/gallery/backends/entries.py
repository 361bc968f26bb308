"""Entries of backends, and parsing an index (docs/reference/wire/gallery.md#backend-entry). Pure.

An entry is *meta* if it has capabilities and no URI: it only maps capabilities to concrete builds.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeAlias

import msgspec

from corral.contract.codec import Message
from corral.contract.manifest import LOCALAI, Continues, Manifest, Needs, check_manifest
from corral.contract.sources import DIRECTORY, FILE, OCI, OCIFILE, Source, TextFile, is_safe_path, parse_uri
from corral.gallery.galleries import BUILT_IN, Gallery
from corral.gallery.index import Index, is_web_link, make_index
from corral.gallery.yaml_items import LIMITS, Item, Limits, read_items
from corral.kit.errors import Invalid

DEVELOPMENT_SUFFIX = "development"
BUILTIN_SCHEME = "builtin://"
MAX_FILES_BYTES = 256 << 10

# The name becomes a folder's name, and a part of `gallery@name`.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,199}\Z")
_SHA256 = re.compile(r"[0-9a-f]{64}\Z")
_PLATFORM = re.compile(r"[a-z0-9]+/[a-z0-9]+\Z")
_Strings: TypeAlias = "tuple[str, ...]"


class _RawExtension(Message, frozen=True):
    """The `corral:` extension as written: the manifest, and fields for choosing a build."""

    protocol: str = ""
    command: _Strings = ()
    env: dict[str, str] = msgspec.field(default_factory=dict)
    ready: dict[str, str] = msgspec.field(default_factory=dict)
    slots: int = 1
    devices: str = ""
    needs: Needs | None = None
    continues: Continues | None = None
    platforms: _Strings = ()
    files: dict[str, str] = msgspec.field(default_factory=dict)


class _RawBackendEntry(Message, frozen=True):
    name: str = ""
    alias: str = ""
    uri: str = ""
    mirrors: _Strings = ()
    capabilities: dict[str, str] = msgspec.field(default_factory=dict)
    version: str = ""
    sha256: str = ""
    description: str = ""
    license: str = ""
    icon: str = ""
    urls: _Strings = ()
    tags: _Strings = ()
    size: str = ""
    corral: _RawExtension | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendEntry:
    gallery: Gallery
    name: str
    alias: str = ""
    uri: str = ""
    mirrors: tuple[str, ...] = ()
    capabilities: MappingProxyType[str, str] = field(default_factory=lambda: MappingProxyType({}))
    version: str = ""
    sha256: str = ""
    description: str = ""
    license: str = ""
    icon: str = ""
    urls: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    size: str = ""
    manifest: Manifest | None = None  # None: LocalAI's run.sh
    platforms: tuple[str, ...] = ()  # os/arch of this build; empty: the source tells
    files: tuple[TextFile, ...] = ()  # written next to the content of the URI

    @property
    def id(self) -> str:
        return f"{self.gallery.name}@{self.name}"

    @property
    def is_meta(self) -> bool:
        return bool(self.capabilities) and not self.uri

    def is_development(self, suffix: str = DEVELOPMENT_SUFFIX) -> bool:
        return self.name.endswith(f"-{suffix}")


BackendIndex = Index[BackendEntry]


def read_index(gallery: Gallery, body: bytes, limits: Limits = LIMITS) -> BackendIndex:
    """Every usable entry, and a reason for each that is not. Raises Invalid if the body is not a list at all."""
    return make_index(gallery, read_items(body, limits), _parse_entry)


def _parse_entry(gallery: Gallery, item: Item) -> tuple[BackendEntry, list[str]]:
    """The entry, and notes on what of it is ignored. Raises Invalid if the entry cannot be used."""
    written = _convert(item.value)
    if not written.name:
        raise Invalid("the entry has no name")
    if not _NAME.match(written.name):
        raise Invalid(f"{written.name[:64]!r} cannot be a folder name")
    if written.alias and not _NAME.match(written.alias):
        raise Invalid(f"alias {written.alias[:64]!r} cannot be a folder name")
    if not written.uri and not written.capabilities:
        raise Invalid("the entry has neither a uri nor capabilities")
    if written.uri and not written.uri.startswith(BUILTIN_SCHEME):
        _check_source(gallery, parse_uri(written.uri))
    elif written.uri and gallery != BUILT_IN:
        raise Invalid("builtin:// is only allowed in the built-in gallery")
    if written.sha256 and not _SHA256.match(written.sha256.lower()):
        raise Invalid(f"sha256 {written.sha256[:80]!r} is not 64 hexadecimal digits")
    extension = written.corral
    mirrors, notes = _mirrors(gallery, written)
    entry = BackendEntry(
        gallery=gallery,
        mirrors=mirrors,
        capabilities=MappingProxyType(written.capabilities),
        sha256=written.sha256.lower(),
        icon=written.icon if is_web_link(written.icon) else "",
        urls=tuple(filter(is_web_link, written.urls)),
        manifest=_manifest(extension) if extension is not None else None,
        platforms=_platforms(extension) if extension is not None else (),
        files=_files(extension) if extension is not None else (),
        **{key: getattr(written, key) for key in _COPIED},
    )
    return entry, notes


_COPIED = ("name", "alias", "uri", "version", "description", "license", "tags", "size")


def _convert(value: object) -> _RawBackendEntry:
    try:
        # Every scalar was read as text; msgspec converts numbers.
        return msgspec.convert(value, type=_RawBackendEntry, strict=False)
    except msgspec.ValidationError as error:
        raise Invalid(str(error)) from error


def _check_source(gallery: Gallery, source: Source) -> None:
    if source.kind in (FILE, DIRECTORY, OCIFILE) and not gallery.url.startswith("file://"):
        # An index from elsewhere must not refer to files of our machines.
        what = f"the entry names a path on the machine ({source.uri[:200]})"
        raise Invalid(f"{what}; only a gallery that is a local file may do that")


def _mirrors(gallery: Gallery, written: _RawBackendEntry) -> tuple[tuple[str, ...], list[str]]:
    usable, notes = [], []
    for mirror in written.mirrors:
        try:
            _check_source(gallery, parse_uri(mirror, image=_is_image(written.uri)))
            usable.append(mirror)
        except Invalid as error:
            notes.append(f"a mirror is ignored: {error.message}")
    return tuple(usable), notes


def _is_image(uri: str) -> bool:
    return bool(uri) and not uri.startswith(BUILTIN_SCHEME) and parse_uri(uri).kind == OCI


def _manifest(extension: _RawExtension) -> Manifest | None:
    """None: a build that is started like LocalAI's (`run.sh`) and declares nothing."""
    if extension.protocol:
        fields = ("protocol", "command", "env", "slots", "devices", "needs", "ready", "continues")
        wanted: dict[str, Any] = {key: getattr(extension, key) for key in fields}
        try:
            manifest = msgspec.convert(wanted, type=Manifest, strict=False)
        except msgspec.ValidationError as error:
            raise Invalid(f"corral: {error}") from error
    elif extension.needs is not None:
        manifest = msgspec.structs.replace(LOCALAI, needs=extension.needs)
    else:
        return None
    try:
        check_manifest(manifest)
    except Invalid as error:
        raise Invalid(f"corral: {error.message}") from error
    return manifest


def _platforms(extension: _RawExtension) -> tuple[str, ...]:
    if bad := [platform for platform in extension.platforms if not _PLATFORM.match(platform)]:
        raise Invalid(f"corral: {bad[0][:64]!r} is not a platform: write os/arch, such as linux/amd64")
    return extension.platforms


def _files(extension: _RawExtension) -> tuple[TextFile, ...]:
    if bad := [path for path in extension.files if not is_safe_path(path)]:
        raise Invalid(f"corral: the file {bad[0][:64]!r} would be outside the build's folder")
    if sum(len(text) for text in extension.files.values()) > MAX_FILES_BYTES:
        raise Invalid(f"corral: the files have more than {MAX_FILES_BYTES} bytes")
    return tuple(TextFile(path, text) for path, text in sorted(extension.files.items()))
