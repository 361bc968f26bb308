"""The entries of the galleries for lists and pages, with their installed nodes and running operations
(docs/reference/wire/http-backends.md#routes). Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from corral.kit.errors import Invalid

Entry = Mapping[str, Any]
SORTS = ("", "name", "repository", "license", "status")
ORDERS = ("", "asc", "desc")


@dataclass(frozen=True)
class Query:
    term: str = ""
    tag: str = ""
    page: int = 1
    items: int = 9
    sort: str = ""
    order: str = ""


@dataclass(frozen=True)
class Busy:
    """An operation about a backend that has not ended."""

    job_id: str
    kind: str
    state: str = ""


def available_entries(entries: Sequence[Entry], installed: Sequence[Entry]) -> list[dict[str, Any]]:
    there = _by_name(installed)
    return [dict(entry) | {"installed": _nodes(entry, there) is not None} for entry in entries]


def known_entries(entries: Sequence[Entry], installed: Sequence[Entry]) -> list[dict[str, Any]]:
    """Each name once, including installed backends that no gallery lists."""
    there = _by_name(installed)
    known: dict[str, dict[str, Any]] = {}
    for entry in entries:
        name = str(entry["name"])
        shown = {"name": name, "description": str(entry.get("description", "")), "installed": name in there}
        known.setdefault(name, shown)
    for name in there:
        known.setdefault(name, {"name": name, "description": "", "installed": True})
    return [known[name] for name in sorted(known)]


def page_of(
    entries: Sequence[Entry],
    installed: Sequence[Entry],
    busy: Mapping[str, Busy],
    galleries: Sequence[Entry],
    query: Query,
) -> dict[str, Any]:
    """One page of entries, with its navigation."""
    if query.sort not in SORTS:
        raise Invalid(f"cannot sort by {query.sort[:40]!r}; choose among {', '.join(SORTS[1:])}")
    if query.order not in ORDERS:
        raise Invalid(f"order is asc or desc, not {query.order[:40]!r}")
    there = _by_name(installed)
    rows = [_row(entry, there, busy) for entry in entries]
    tags = sorted({str(tag) for entry in entries for tag in entry.get("tags", ())})
    found = [row for row in rows if _matches(row, query)]
    found.sort(key=lambda row: _sort_key(row, query.sort), reverse=query.order == "desc")
    pages = max(1, math.ceil(len(found) / query.items))
    page = min(query.page, pages)
    return {
        "backends": found[(page - 1) * query.items : page * query.items],
        "repositories": [dict(gallery) for gallery in galleries],
        "allTags": tags,
        "processingBackends": {name: job.job_id for name, job in sorted(busy.items())},
        "taskTypes": {
            name: "Deletion" if job.kind == "delete" else "Installation" for name, job in sorted(busy.items())
        },
        "availableBackends": len(found),
        "installedBackends": len(installed),
        "currentPage": page,
        "totalPages": pages,
        "prevPage": max(1, page - 1),
        "nextPage": min(pages, page + 1),
    }


def _row(entry: Entry, there: Mapping[str, Entry], busy: Mapping[str, Busy]) -> dict[str, Any]:
    name = str(entry["name"])
    nodes = _nodes(entry, there)
    job = busy.get(name)
    gallery = entry.get("gallery") or {}
    return dict(entry) | {
        "id": entry.get("id") or name,
        "name": name,
        "description": entry.get("description", ""),
        "tags": list(entry.get("tags", ())),
        "gallery": gallery.get("name", "") if isinstance(gallery, Mapping) else str(gallery),
        "installed": nodes is not None,
        "isMeta": bool(entry.get("is_meta")),
        "nodes": nodes or [],
        "upgrade_available": bool(there.get(name, {}).get("upgrade_available")),
        "processing": job is not None,
        "jobID": job.job_id if job else "",
        "isDeletion": job is not None and job.kind == "delete",
    }


def _matches(row: Entry, query: Query) -> bool:
    term, tag = query.term.strip().lower(), query.tag.strip().lower()
    texts = (row["name"], row["description"], row["gallery"], *row["tags"])
    return (not term or any(term in str(text).lower() for text in texts)) and (
        not tag or tag in (str(each).lower() for each in row["tags"])
    )


def _sort_key(row: Entry, sort: str) -> tuple[object, ...]:
    name = str(row["name"]).lower()
    match sort:
        case "repository":
            return (str(row["gallery"]).lower(), name)
        case "license":
            return (str(row.get("license", "")).lower(), name)
        case "status":
            return (not row["installed"], name)
        case _:
            return (name,)


def _by_name(installed: Sequence[Entry]) -> dict[str, Entry]:
    return {str(entry["Name"]): entry for entry in installed}


def _nodes(entry: Entry, there: Mapping[str, Entry]) -> list[dict[str, Any]] | None:
    """The nodes on which it is installed; None = none."""
    found = there.get(str(entry["name"]))
    return list(found["nodes"]) if found is not None else None
