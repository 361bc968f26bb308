"""Computes a model's row from a new definition, and checks the change. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

import msgspec

from corral.contract.installs import MAX_SOURCE_LENGTH
from corral.contract.models import Definition
from corral.gallery.models.documents import read_mapping
from corral.kit.errors import Conflict, Invalid
from corral.store.records import Rollout
from corral.store.tables.models import StoredModel

MAX_BYTES = 256 << 10  # a definition is part of every order to start a replica
MAX_PREVIOUS_REVISIONS = 8
SET_BY_DATABASE = datetime(1970, 1, 1, tzinfo=UTC)


class ModelOrigin(StrEnum):
    PERSON = "person"
    GALLERY = "gallery"
    FILE = "file"


def next_row(
    before: StoredModel | None,
    definition: Definition,
    *,
    origin: ModelOrigin,
    source: str = "",
    by: str = "",
    recreate: bool = False,
) -> StoredModel | None:
    """The new row; None when nothing changes. Raises Invalid for a definition that is too large."""
    if len(msgspec.json.encode(definition.whole)) > MAX_BYTES:
        raise Invalid(f"the definition of {definition.name} has more than {MAX_BYTES >> 10} KiB")
    revision = definition.revision
    row = StoredModel(
        id=definition.name,
        definition=definition.whole,
        revision=revision,
        origin=origin,
        created_at=SET_BY_DATABASE,
        updated_at=SET_BY_DATABASE,
        source=source,
        created_by=by,
        previous_revisions=previous_revisions_after(before, revision, recreate=recreate) if before is not None else (),
    )
    if before is not None and all(getattr(row, key) == getattr(before, key) for key in _COMPARED):
        return None
    return row


_COMPARED = ("definition", "revision", "origin", "source", "previous_revisions")


def previous_revisions_after(before: StoredModel, revision: str, *, recreate: bool) -> tuple[str, ...]:
    """The revisions whose replicas may serve until one of `revision` is ready."""
    if recreate:
        return ()
    if revision == before.revision:
        return before.previous_revisions
    # It is not known here whether a replica of the last revision ever got ready: earlier ones may still serve.
    earlier = dict.fromkeys((before.revision, *before.previous_revisions))
    return tuple(each for each in earlier if each != revision)[:MAX_PREVIOUS_REVISIONS]


def check_alias(definition: Definition, others: dict[str, str]) -> None:
    """`others`: the target of every other alias, empty for real models. An alias of an alias is refused, as the
    contract says, so that circles cannot arise."""
    if definition.alias and others.get(definition.alias):
        raise Invalid(f"{definition.alias} is itself an alias, of {others[definition.alias]}: name that one")
    pointing = sorted(name for name, target in others.items() if target == definition.name)
    if definition.alias and pointing:
        raise Invalid(f"{definition.name} cannot become an alias: {', '.join(pointing)} stand for it")


def read_whole(definition: Mapping[str, Any], text: str) -> dict[str, Any]:
    if definition and text:
        raise Invalid("give the definition once: as a mapping or as text")
    return read_mapping(text.encode(), exact=True) if text else dict(definition)


def check_source(text: str) -> str:
    """Where a definition came from, as it is shown to users."""
    if len(text) > MAX_SOURCE_LENGTH or not text.isprintable():
        raise Invalid(f"source has at most {MAX_SOURCE_LENGTH} printable characters")
    return text


def refuse_if_from_file(model: StoredModel | None) -> None:
    if model is not None and model.origin == ModelOrigin.FILE:
        file = model.source.partition("/")[2]
        raise Conflict(f"{model.id} is defined by the file {file} in the models folder: change that file")


def refuse_if_on_trial(rollout: Rollout | None) -> None:
    """Of two new revisions on trial, the requests of neither would tell which one to keep."""
    if rollout is not None:
        short = rollout.operation_id[:8]
        raise Conflict(
            f"{rollout.subject} has a new revision on trial (operation {short}): `corral rollouts promote {short}` "
            f"keeps it, `corral rollouts abort {short}` returns to the one before; then change the model again"
        )


def file_notes(model: StoredModel) -> tuple[str, ...]:
    """For the user who forces the deletion: a folder that is still watched defines the model again."""
    if model.origin != ModelOrigin.FILE:
        return ()
    file = model.source.partition("/")[2]
    return (f"as long as the file {file} is in a watched models folder, {model.id} comes back: remove that file",)


def alias_of(model: StoredModel) -> str:
    alias = model.definition.get("alias")
    return alias.strip() if isinstance(alias, str) else ""
