"""Models as the page shows them: a line each with its state in one word, under it a line per replica. Pure;
`_models.html` writes what is decided here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import msgspec

from corral.contract.catalogue import ModelView, ScheduleView
from corral.contract.loads import LoadState, LoadStatus
from corral.controller.web.list_filter import Chip, ListFilter, window
from corral.controller.web.words import ago, counted, model_href, node_href, parse_moment, size, until, used_of

SHOWN = 50
REPLICAS_SHOWN = 30  # of one model; those that are not simply ready come first where there are more
_ONLY = (  # what a chip shows; its word; in the order of the chips
    ("", "all"),
    ("ready", "ready"),
    ("loading", "loading"),
    ("waiting", "waiting"),
    ("failed", "failed"),
    ("cold", "not loaded"),
    ("alias", "other names"),
    ("disabled", "disabled"),
)
_PHASES = {
    LoadState.PENDING: "choosing a node",
    LoadState.INSTALLING: "installing its backend",
    LoadState.STAGING: "fetching its files",
    LoadState.LOADING: "starting",
}
_REPLICA_WORDS = {"staging": "on its way", "loading": "starting", "loaded": "ready", "unloading": "ending"}
_REVISION = 12  # characters that tell one from another
_DESCRIPTION = 160


@dataclass(frozen=True)
class ReplicaLine:
    key: str
    id: str
    node: str
    href: str  # of the node
    state: str  # staging, loading, loaded, unloading, failed
    words: str
    phase: str  # what its node is doing for it
    percent: int | None  # of bytes that are moving
    amount: str
    requests: str
    memory: str
    older: bool  # of an earlier revision
    used_at: str
    used: str
    note: str


@dataclass(frozen=True)
class ModelLine:
    id: str
    href: str
    state: str  # as in _ONLY
    words: str
    description: str
    facts: tuple[str, ...]
    revision: str
    phase: str  # of a load
    percent: int | None
    amount: str
    cause: str  # of a failed one
    retry_at: str
    retry: str
    replicas: tuple[ReplicaLine, ...]
    replicas_more: str  # those that are not shown, in words
    may_load: bool
    may_unload: bool
    schedule: str  # JSON, for the dialog
    may_scale: bool
    of_a_file: bool


@dataclass(frozen=True)
class ModelTable:
    lines: tuple[ModelLine, ...]
    chips: tuple[Chip, ...]
    total: int
    range: str
    previous: str | None
    next: str | None
    filters: ListFilter


def catalogue_of(
    models: Sequence[ModelView],
    loads: Sequence[LoadStatus],
    replicas: Sequence[Mapping[str, Any]],
    filters: ListFilter,
    now: datetime,
) -> ModelTable:
    by_model: dict[str, list[Mapping[str, Any]]] = {}
    for row in replicas:
        by_model.setdefault(str(row["model_name"]), []).append(row)
    load_of = {load.model: load for load in loads}
    lines = [line_of(model, load_of.get(model.id), by_model.get(model.id, ()), now) for model in models]
    only = filters.only if filters.only in dict(_ONLY) else ""
    words = filters.find.lower().split()
    fitting = [
        line
        for model, line in zip(models, lines, strict=True)
        if (not only or line.state == only) and all(word in _searched(model) for word in words)
    ]
    part = window(ListFilter(only, filters.find, filters.at), len(fitting), len(lines), SHOWN, ("model", "models"))
    counts = Counter(line.state for line in lines)
    chips = (
        Chip(kind, word, counts[kind] if kind else len(lines), part.filters.query(only=kind, at=0), kind == only)
        for kind, word in _ONLY
    )
    shown = tuple(fitting[part.filters.at : part.filters.at + SHOWN])
    return ModelTable(shown, tuple(chips), len(lines), part.range, part.previous, part.next, part.filters)


def line_of(
    model: ModelView, load: LoadStatus | None, replicas: Sequence[Mapping[str, Any]], now: datetime
) -> ModelLine:
    moving = load if load is not None and load.state not in (LoadState.FAILED, LoadState.LOADED) else None
    failed = load if load is not None and load.state == LoadState.FAILED else None
    lines = tuple(_replica(model, row, moving, now) for row in sorted(replicas, key=_place))
    ready = sum(line.state == "loaded" and not line.older for line in lines)
    state = _state(model, ready, moving, failed, lines)
    shown, more = _some(lines)
    retry_at = now + timedelta(seconds=failed.retry_after_s) if failed is not None else None
    return ModelLine(
        id=model.id,
        href=model_href(model.id),
        state=state,
        words=_words(model, state, ready),
        description=_shortened(model.description),
        facts=tuple(_facts(model)),
        revision=model.config_revision[:_REVISION],
        phase=_phase(moving) if moving is not None else "",
        percent=_percent(moving),
        amount=_amount(moving),
        cause=(failed.error or "no reason was reported") if failed is not None else "",
        retry_at=retry_at.isoformat() if retry_at is not None else "",
        retry=until(retry_at, now) if retry_at is not None else "",
        replicas=shown,
        replicas_more=more,
        may_load=not model.alias and not model.disabled and not ready and moving is None,
        may_unload=bool(lines) or moving is not None,
        schedule=_schedule(model.schedule),
        may_scale=not model.alias,
        of_a_file=model.origin == "file",
    )


def wanted(schedule: ScheduleView | None) -> str:
    """How many replicas somebody asked for."""
    if schedule is None:
        return ""
    if schedule.spread_all:
        return "one on every node"
    if schedule.max_replicas and schedule.min_replicas == schedule.max_replicas:
        return counted(schedule.min_replicas, "replica", "replicas")
    if schedule.max_replicas:
        return f"{schedule.min_replicas} to {schedule.max_replicas} replicas"
    return f"at least {counted(schedule.min_replicas, 'replica', 'replicas')}" if schedule.min_replicas else ""


def _state(
    model: ModelView,
    ready: int,
    moving: LoadStatus | None,
    failed: LoadStatus | None,
    replicas: Sequence[ReplicaLine],
) -> str:
    if model.alias:
        return "alias"
    if model.disabled:
        return "disabled"
    if ready:
        return "ready"
    if moving is not None:
        return "waiting" if moving.state == LoadState.PENDING else "loading"
    if failed is not None:
        return "failed"
    if any(line.state in ("staging", "loading") for line in replicas):
        return "loading"
    schedule = model.schedule
    if schedule is not None and (schedule.min_replicas or schedule.spread_all):
        return "waiting"  # somebody wants it, and nothing has come of that yet
    return "cold"


def _words(model: ModelView, state: str, ready: int) -> str:
    if state == "alias":
        return "other name"
    if state != "ready":
        return dict(_ONLY)[state]
    least = model.schedule.min_replicas if model.schedule is not None else 0
    return f"ready × {ready} of {least}" if least > ready else f"ready × {ready}"


def _facts(model: ModelView) -> list[str]:
    parts = [model.backend or "no backend", size(model.size_bytes) if model.size_bytes else ""]
    parts.append(f"context {model.context_size}" if model.context_size else "")
    if model.alias:
        parts = [f"stands for {model.alias}"]
    parts.append(wanted(model.schedule))
    if model.schedule is not None and model.schedule.node_selector:
        parts.append(f"on nodes with {_labels(model.schedule)}")
    parts.append("pinned" if model.pinned else "")
    parts.append(f"from the file {model.source.partition('/')[2]}" if model.origin == "file" else model.source)
    return [fact for fact in parts if fact]


def _replica(model: ModelView, row: Mapping[str, Any], moving: LoadStatus | None, now: datetime) -> ReplicaLine:
    state = "failed" if row.get("process_state") == "failed" else str(row["state"])
    serves = state == "loaded" and row.get("process_state") in ("", "ready")
    mine = (
        moving if moving is not None and moving.node == row["node_name"] and state in ("staging", "loading") else None
    )
    used = parse_moment(str(row.get("last_used", "")))
    words = _REPLICA_WORDS.get(state, state) if serves or state != "loaded" else str(row.get("process_state"))
    phase = _PHASES.get(LoadState(mine.state), "") if mine is not None else ""
    in_flight = int(row.get("in_flight") or 0)
    restarts = int(row.get("restarts") or 0)
    note = str(row.get("error") or (row.get("reason") if state == "unloading" else "") or "")
    if restarts:
        note = f"restarted {counted(restarts, 'time', 'times')}" + (f": {note}" if note else "")
    return ReplicaLine(
        key=f"{row['node_id']} {row['replica_index']} {row['id']}",
        id=str(row["id"]),
        href=node_href(str(row["node_name"])),
        node=str(row["node_name"]) + (f" #{row['replica_index']}" if row["replica_index"] else ""),
        state=state if serves or state != "loaded" else "loading",
        words=words,
        phase=phase if phase != words else "",
        percent=_percent(mine),
        amount=_amount(mine),
        requests=counted(in_flight, "request", "requests") if in_flight else "idle" if serves else "",
        memory=_memory(row),
        older=row["config_revision"] != model.config_revision,
        used_at=used.isoformat() if serves and used is not None else "",
        used=ago(used, now) if serves else "",
        note=note,
    )


def _some(lines: tuple[ReplicaLine, ...]) -> tuple[tuple[ReplicaLine, ...], str]:
    if len(lines) <= REPLICAS_SHOWN:
        return lines, ""
    ranked = sorted(lines, key=lambda line: line.state == "loaded" and not line.older)
    left = Counter(line.words for line in ranked[REPLICAS_SHOWN:])
    return tuple(ranked[:REPLICAS_SHOWN]), "and " + ", ".join(f"{count} {words}" for words, count in left.items())


def _memory(row: Mapping[str, Any]) -> str:
    devices = row.get("devices") or ()
    where = f"GPU {', '.join(str(device) for device in devices)}" if devices else ""
    return " · ".join(part for part in (size(row["memory_bytes"]) if row.get("memory_bytes") else "", where) if part)


def _phase(load: LoadStatus) -> str:
    return load.message or _PHASES.get(LoadState(load.state), load.state)


def _percent(load: LoadStatus | None) -> int | None:
    return int(load.progress) if load is not None and load.total_bytes else None


def _amount(load: LoadStatus | None) -> str:
    if load is None or not load.total_bytes:
        return ""
    words = used_of(load.bytes_sent, load.total_bytes)
    return f"{words}, about {load.eta_seconds:.0f} s left" if load.eta_seconds else words


def _schedule(schedule: ScheduleView | None) -> str:
    if schedule is None:
        return ""
    parts = {
        "min": schedule.min_replicas,
        "max": schedule.max_replicas,
        "all": schedule.spread_all,
        "selector": _labels(schedule),
    }
    return msgspec.json.encode(parts).decode()


def _labels(schedule: ScheduleView) -> str:
    chosen = msgspec.json.decode(schedule.node_selector, type=dict[str, str]) if schedule.node_selector else {}
    return ",".join(f"{key}={value}" for key, value in chosen.items())


def _place(row: Mapping[str, Any]) -> tuple[str, int]:
    return str(row["node_name"]), int(row["replica_index"])


def _searched(model: ModelView) -> str:
    return " ".join((model.id, model.alias, model.backend, model.description, *model.tags)).lower()


def _shortened(text: str) -> str:
    words = " ".join(text.split())
    return words if len(words) <= _DESCRIPTION else words[: _DESCRIPTION - 1] + "…"
