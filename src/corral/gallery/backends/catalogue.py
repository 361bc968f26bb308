"""Several galleries as one catalogue: finds entries by name, searches, suggests similar names
(docs/reference/wire/gallery.md#gallery-sources). Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from corral.contract.hardware import DISABLED
from corral.gallery.backends.compatibility import is_listed
from corral.gallery.backends.entries import BackendEntry, BackendIndex
from corral.kit.humanize import format_suggestions, suggest_names

_NEAREST = 5
_NONE: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class AliasGroup:
    """No entry has this name, but these builds share it as their alias."""

    alias: str
    builds: tuple[BackendEntry, ...]


@dataclass(frozen=True, slots=True)
class UnknownBackend:
    """No backend has this name. `unread`: galleries that could not be read, and why."""

    query: str
    nearest: tuple[str, ...] = ()
    unread: Mapping[str, str] = field(default_factory=dict)
    why: str = ""

    @property
    def reason(self) -> str:
        if self.why:
            return self.why
        hint = format_suggestions(self.nearest)
        unread = "".join(f"; the gallery {name} could not be read ({why})" for name, why in self.unread.items())
        return f"no backend is called {self.query!r}{unread}{hint}"


class BackendCatalogue:
    """Indexes in their order: of two entries with one name the first wins; the other is found as `gallery@name`."""

    def __init__(self, indexes: Sequence[BackendIndex], unread: Mapping[str, str] = _NONE) -> None:
        self.indexes = tuple(indexes)
        self.unread = unread
        self._by_gallery = {
            index.gallery.name.lower(): {entry.name.lower(): entry for entry in index.entries} for index in indexes
        }

    @property
    def entries(self) -> tuple[BackendEntry, ...]:
        return tuple(entry for index in self.indexes for entry in index.entries)

    def find(self, query: str) -> BackendEntry | AliasGroup | UnknownBackend:
        """Find by name or `gallery@name`, otherwise by alias; without case."""
        gallery, name = split_query(query)
        indexes = [entries for key, entries in self._by_gallery.items() if gallery in ("", key)]
        for entries in indexes:
            if name in entries:
                return entries[name]
        builds = [
            entry for entries in indexes for entry in entries.values() if entry.alias.lower() == name and entry.uri
        ]
        if name and builds:
            return AliasGroup(name, tuple(builds))
        return UnknownBackend(query, self.nearest(name), self.unread)

    def build_of(self, meta: BackendEntry, value: str) -> BackendEntry | str:
        """The concrete entry that a value of a capability map names: in the meta's own gallery, or as `gallery@name`. A
        text tells why there is none."""
        gallery, name = split_query(value)
        gallery = gallery or meta.gallery.name.lower()
        found = self._by_gallery.get(gallery, {}).get(name)
        if found is not None:
            return found if not found.is_meta else f"{found.id} is itself a meta entry"
        why = {name.lower(): reason for name, reason in self.unread.items()}.get(gallery)
        if why is not None:
            return f"the gallery {gallery} could not be read: {why}"
        if gallery not in self._by_gallery:
            return f"there is no gallery {gallery}"
        return f"there is no {name} in the gallery {gallery}"

    def meta_of(self, build: BackendEntry) -> BackendEntry | None:
        """The meta entry that lists this build: the one to install if every node should have the backend."""
        for meta in self.entries:
            if meta.is_meta and any(self.build_of(meta, value) == build for value in meta.capabilities.values()):
                return meta
        return None

    def nearest(self, name: str) -> tuple[str, ...]:
        """Names that the caller may have meant."""
        names = dict.fromkeys(entry.name for entry in self.entries if not entry.is_development())
        return suggest_names(name, names, limit=_NEAREST)

    def search(
        self,
        term: str = "",
        *,
        tag: str = "",
        capabilities: Collection[tuple[str, str]] = ((DISABLED, ""),),
        development: bool = True,
    ) -> tuple[BackendEntry, ...]:
        """Entries with the term in their name, description, tags or gallery, that suit one of the (capability,
        platform) pairs. In the order of the galleries."""
        return tuple(
            entry
            for entry in self.entries
            if _matches(entry, term.strip().lower())
            and (not tag or tag.lower() in (each.lower() for each in entry.tags))
            and (development or not entry.is_development())
            and any(is_listed(entry, capability, platform) for capability, platform in capabilities)
        )


def split_query(query: str) -> tuple[str, str]:
    """Split `gallery@name`, in lower case; a path separator is read as `__`, because names contain none."""
    gallery, at, name = query.strip().rpartition("@")
    return (gallery.lower() if at else ""), name.replace("/", "__").replace("\\", "__").lower()


def _matches(entry: BackendEntry, term: str) -> bool:
    return not term or any(
        term in text.lower() for text in (entry.name, entry.description, entry.gallery.name, *entry.tags)
    )
