"""The index of one gallery: its usable entries, and a reason for each entry that was left out. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from corral.gallery.galleries import Gallery
from corral.gallery.yaml_items import Item, Items, Problem
from corral.kit.errors import Invalid

_MAX_LABEL_CHARS = 200


class NamedEntry(Protocol):
    @property
    def name(self) -> str: ...


EntryT = TypeVar("EntryT", bound=NamedEntry)


@dataclass(frozen=True, slots=True)
class Index(Generic[EntryT]):
    gallery: Gallery
    entries: tuple[EntryT, ...]
    problems: tuple[Problem, ...] = ()


def make_index(
    gallery: Gallery, items: Items, parse: Callable[[Gallery, Item], tuple[EntryT, Sequence[str]]]
) -> Index[EntryT]:
    """`parse` returns an entry and notes on what of it is ignored, or raises Invalid. Of two entries with one name the
    first counts; names are compared without case."""
    problems = list(items.problems)
    entries: dict[str, EntryT] = {}
    for item in items.items:
        label = label_of(item)
        try:
            entry, notes = parse(gallery, item)
        except Invalid as error:
            problems.append(Problem(item.line, error.message, label))
            continue
        problems += (Problem(item.line, note, label) for note in notes)
        if entry.name.lower() in entries:
            problems.append(Problem(item.line, "an earlier entry has the same name; this one is ignored", label))
        else:
            entries[entry.name.lower()] = entry
    return Index(gallery, tuple(entries.values()), tuple(sorted(problems, key=lambda problem: problem.line)))


def label_of(item: Item) -> str:
    """The name that a problem with this item shows."""
    name = item.value.get("name")
    return name[:_MAX_LABEL_CHARS] if isinstance(name, str) else ""


def is_web_link(text: str) -> bool:
    """Only such links are shown to users: a page must not run a `javascript:` URL."""
    return text.startswith(("https://", "http://"))
