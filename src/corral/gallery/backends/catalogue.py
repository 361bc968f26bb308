"""Several galleries as one: finding entries by name, searching, nearest names
(docs/reference/wire/gallery.md#gallery-sources). Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from corral.contract.capability import DISABLED
from corral.gallery.backends.compatibility import is_listed
from corral.gallery.backends.entries import BackendEntry, Index
from corral.kit.suggest import format_suggestions, suggest_names

_NEAREST = 5
_NONE: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class AliasGroup:
    """No entry has this name, but these builds share it as their alias."""

    alias: str
    builds: tuple[BackendEntry, ...]


@dataclass(frozen=True, slots=True)
class Unknown:
    """Nothing is called so. `unread` has the galleries that could not be asked, and why."""

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


class Catalogue:
    """Indexes in their order: where two have the same name, the first wins and the other is `gallery@name`."""

    def __init__(self, indexes: Sequence[Index], unread: Mapping[str, str] = _NONE) -> None:
        self.indexes = tuple(indexes)
        self.unread = unread
        self._by_gallery = {
            index.gallery.name.lower(): {entry.name.lower(): entry for entry in index.entries} for index in indexes
        }

    @property
    def entries(self) -> tuple[BackendEntry, ...]:
        return tuple(entry for index in self.indexes for entry in index.entries)

    def find(self, query: str) -> BackendEntry | AliasGroup | Unknown:
        """By name, by `gallery@name`, else by alias; case does not matter."""
        gallery, name = split_query(query)
        shelves = [shelf for key, shelf in self._by_gallery.items() if gallery in ("", key)]
        for shelf in shelves:
            if name in shelf:
                return shelf[name]
        builds = [entry for shelf in shelves for entry in shelf.values() if entry.alias.lower() == name and entry.uri]
        if name and builds:
            return AliasGroup(name, tuple(builds))
        return Unknown(query, self.nearest(name), self.unread)

    def build_of(self, meta: BackendEntry, value: str) -> BackendEntry | str:
        """The concrete entry a capability map names: in the meta's own gallery, unless it says `gallery@name`.
        Else why there is none."""
        gallery, name = split_query(value)
        gallery = gallery or meta.gallery.name.lower()
        found = self._by_gallery.get(gallery, {}).get(name)
        if found is not None:
            return found if not found.is_meta else f"{found.id} is itself a choice of builds"
        why = {name.lower(): reason for name, reason in self.unread.items()}.get(gallery)
        if why is not None:
            return f"the gallery {gallery} could not be read: {why}"
        if gallery not in self._by_gallery:
            return f"there is no gallery {gallery}"
        return f"there is no {name} in the gallery {gallery}"

    def meta_of(self, build: BackendEntry) -> BackendEntry | None:
        """The choice of builds this one is part of: what to ask for instead when every node shall have it."""
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
        """Entries with the term in name, description, tags or gallery, that a machine with one of the (capability,
        platform) pairs is shown. In the order of the galleries."""
        return tuple(
            entry
            for entry in self.entries
            if _matches(entry, term.strip().lower())
            and (not tag or tag.lower() in (each.lower() for each in entry.tags))
            and (development or not entry.is_development())
            and any(is_listed(entry, capability, platform) for capability, platform in capabilities)
        )


def split_query(query: str) -> tuple[str, str]:
    """`gallery@name` in lower case; a path separator could never be in a name, so it is read as `__`."""
    gallery, at, name = query.strip().rpartition("@")
    return (gallery.lower() if at else ""), name.replace("/", "__").replace("\\", "__").lower()


def _matches(entry: BackendEntry, term: str) -> bool:
    return not term or any(
        term in text.lower() for text in (entry.name, entry.description, entry.gallery.name, *entry.tags)
    )
