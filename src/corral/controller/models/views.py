"""Views of models and schedules for the API and for gateways, and whether broken streams of a model are continued.
Pure, except for one log line.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

import msgspec

from corral.contract.catalogue import AvailableModel, ModelView, ScheduleView
from corral.contract.messages.replicas import ReplicaState
from corral.contract.models import Definition, read_definition
from corral.contract.view import ViewModel, ViewPolicy
from corral.controller.runtime.node_views import rfc3339
from corral.gallery.models.entries import ModelEntry
from corral.kit.errors import Invalid
from corral.kit.log import get_log
from corral.store.tables.model_schedules import Schedule
from corral.store.tables.models import StoredModel
from corral.store.tables.node_backends import Processes

log = get_log(__name__)

_ROUND_ROBIN = "round_robin"
CHAT, EMBEDDINGS, RERANK = "chat", "embeddings", "rerank"
_USECASES = {"chat": CHAT, "completion": CHAT, "embeddings": EMBEDDINGS, "rerank": RERANK}
_OTHERS = frozenset(  # a model that is for nothing but these does not chat
    ("transcript", "tts", "image", "video", "vad", "detection", "sound_generation", "speaker_recognition", "tokenize")
)
# By unusable model, the revision that was logged: rows are read many times a minute.
_logged: dict[str, str] = {}


def definition_of(model: StoredModel) -> Definition | None:
    """None for a definition that an earlier release stored and this one cannot read; logged once."""
    try:
        return read_definition(model.definition)
    except Invalid as error:
        if _logged.get(model.id) != model.revision:
            _logged[model.id] = model.revision
            log.warning("stored model cannot be used", model=model.id, error=error.message)
        return None


class FilesMeasured(NamedTuple):
    files: int
    size_bytes: int  # as far as it is known


def declared_files(definition: Definition) -> FilesMeasured:
    return FilesMeasured(len(definition.files), sum(file.size_bytes for file in definition.files))


def model_view(
    model: StoredModel,
    schedule: Schedule | None = None,
    *,
    ready: int = 0,
    measured: FilesMeasured | None = None,
    with_definition: bool = False,
) -> ModelView:
    """`measured`: its files, as far as more is known than the definition says."""
    definition = definition_of(model) or Definition(name=model.id, whole=model.definition, disabled=True)
    described = model.definition.get("description")
    tags = model.definition.get("tags")
    known = measured or declared_files(definition)
    return ModelView(
        id=model.id,
        backend=definition.backend,
        config_revision=model.revision,
        origin=model.origin,
        created_at=rfc3339(model.created_at),
        updated_at=rfc3339(model.updated_at),
        row_version=model.row_version,
        source=model.source,
        created_by=model.created_by,
        alias=definition.alias,
        description=described.strip() if isinstance(described, str) else "",
        context_size=definition.context_size,
        files=known.files,
        size_bytes=known.size_bytes,
        tags=tuple(str(tag) for tag in tags) if isinstance(tags, list) else (),
        pinned=definition.pinned,
        disabled=definition.disabled,
        ready=ready,
        schedule=schedule_view(schedule) if schedule is not None else None,
        definition=model.definition if with_definition else {},
        resume_streams=definition.resume_streams,
    )


def schedule_view(schedule: Schedule) -> ScheduleView:
    selector = schedule.node_selector
    return ScheduleView(
        id=schedule.id,
        model_name=schedule.model,
        node_selector=msgspec.json.encode(selector, order="sorted").decode() if selector else "",
        min_replicas=schedule.min_replicas,
        max_replicas=schedule.max_replicas,
        spread_all=schedule.spread_all,
        route_policy=schedule.route_policy,
        balance_abs_threshold=schedule.balance_abs_threshold,
        balance_rel_threshold=schedule.balance_rel_threshold,
        min_prefix_match=schedule.min_prefix_match,
        unsatisfiable_until=rfc3339(schedule.unsatisfiable_until),
        unsatisfiable_ticks=schedule.unsatisfiable_ticks,
        created_at=rfc3339(schedule.created_at),
        updated_at=rfc3339(schedule.updated_at),
    )


def available_view(entry: ModelEntry, installed: Collection[str]) -> AvailableModel:
    return AvailableModel(
        name=entry.name,
        id=entry.id,
        gallery=entry.gallery.name,
        description=entry.description,
        license=entry.license,
        backend=entry.backend,
        size=entry.size,
        urls=entry.urls,
        tags=entry.tags,
        files=len(entry.files),
        variants=entry.variants,
        installed=entry.id in installed,
    )


def ready_by_model(reports: Iterable[Processes]) -> dict[str, int]:
    found: dict[str, int] = {}
    for row in reports:
        for process in row.processes:
            if process.model and process.state == ReplicaState.READY:
                found[process.model] = found.get(process.model, 0) + 1
    return found


def view_models(models: Iterable[StoredModel], schedules: Mapping[str, Schedule]) -> tuple[ViewModel, ...]:
    """For gateways. Unusable models are left out: requests for them get 404."""
    found = []
    for model in models:
        if (definition := definition_of(model)) is not None:
            found.append(_view_model(model, definition, schedules.get(definition.alias or model.id)))
    return tuple(found)


def _view_model(model: StoredModel, definition: Definition, schedule: Schedule | None) -> ViewModel:
    waiting = definition.while_loading
    return ViewModel(
        id=model.id,
        created=int(model.created_at.timestamp()),
        alias=definition.alias,
        revision=model.revision,
        disabled=definition.disabled,
        while_loading="refuse" if waiting.refuse else "use" if waiting.use else "",
        stand_in=waiting.use,
        load_wait_s=definition.load_wait_s,
        policy=policy_of(schedule) if schedule is not None else None,
        max_concurrent=definition.max_concurrent,
        retry_after_s=definition.retry_after_s,
        resume_streams=definition.resume_streams,
    )


def policy_of(schedule: Schedule) -> ViewPolicy | None:
    """None: nothing of it differs from the fleet's. Where only a threshold is set, the policy is the contract's own."""
    thresholds = (schedule.balance_abs_threshold, schedule.balance_rel_threshold, schedule.min_prefix_match)
    if not schedule.route_policy and not any(thresholds):
        return None
    usual = ViewPolicy()
    return ViewPolicy(
        prefix_cache=schedule.route_policy != _ROUND_ROBIN,
        min_match=schedule.min_prefix_match or usual.min_match,
        abs_slack=schedule.balance_abs_threshold or usual.abs_slack,
        rel_factor=schedule.balance_rel_threshold or usual.rel_factor,
    )


def kinds_of(definition: Definition) -> tuple[str, ...]:
    """Of a model that says nothing: chat, as most are. `known_usecases` has the last word."""
    named = _usecases(definition)
    if named:
        kinds = {_USECASES[word] for word in named if word in _USECASES}
        return tuple(sorted(kinds)) if kinds or named <= _OTHERS else (CHAT,)
    if definition.embeddings or definition.reranking:
        return (*((EMBEDDINGS,) if definition.embeddings else ()), *((RERANK,) if definition.reranking else ()))
    return (CHAT,)


def reads_images(definition: Definition) -> bool:
    return bool(definition.whole.get("mmproj")) or "vision" in _usecases(definition)


def _usecases(definition: Definition) -> set[str]:
    """LocalAI writes them as `chat` or `FLAG_CHAT`."""
    found = definition.whole.get("known_usecases")
    listed = found if isinstance(found, list) else []
    return {word.lower().removeprefix("flag_") for word in listed if isinstance(word, str)}


_MAX_NODE_NAMES = 5


class Resumption(NamedTuple):
    text: str = ""  # empty: the definition does not ask for it
    is_limited: bool = False  # on some node, or on all, a stream that breaks off stays broken


def explain_resumption(definition: Definition, can_continue: Mapping[str, bool]) -> Resumption:
    """`can_continue`: by name of each node that has, or could have, the backend: whether a process there goes on with
    the beginning of an answer."""
    if not definition.resume_streams:
        return Resumption()
    cannot = sorted(name for name, can in can_continue.items() if not can)
    if not can_continue:
        return Resumption("continued on another replica, where a backend declares how it continues a text")
    backend = definition.backend
    if len(cannot) == len(can_continue):
        declares = f"no build of {backend} declares how it continues a text (`continues` in its manifest)"
        return Resumption(f"not continued, though resume_streams is set: {declares}", True)
    if not cannot:
        return Resumption("continued on another replica")
    more = f" and {len(cannot) - _MAX_NODE_NAMES} more" if len(cannot) > _MAX_NODE_NAMES else ""
    on = f"{', '.join(cannot[:_MAX_NODE_NAMES])}{more}"
    declares = f"the build of {backend} there does not declare how it continues a text (`continues` in its manifest)"
    return Resumption(f"continued on another replica, but not from or to {on}: {declares}", True)
