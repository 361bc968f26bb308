"""What becomes of a model's row when its definition is given anew. Pure."""

from __future__ import annotations

from datetime import UTC, datetime
from enum import StrEnum

import msgspec

from corral.contract.models import Definition
from corral.kit.errors import Invalid
from corral.store.tables.models import Model

MOST_BYTES = 256 << 10  # it travels with every order to start a replica
_MOST_FORMERS = 8
_WRITTEN_BY_THE_DATABASE = datetime(1970, 1, 1, tzinfo=UTC)


class Origin(StrEnum):
    PERSON = "person"
    GALLERY = "gallery"
    FILE = "file"


def next_row(
    before: Model | None,
    definition: Definition,
    *,
    origin: Origin,
    source: str = "",
    by: str = "",
    recreate: bool = False,
) -> Model | None:
    """The row as it shall be; None when it is so already. Raises Invalid for a definition too big to travel."""
    if len(msgspec.json.encode(definition.whole)) > MOST_BYTES:
        raise Invalid(f"the definition of {definition.name} has more than {MOST_BYTES >> 10} KiB")
    revision = definition.revision
    row = Model(
        id=definition.name,
        definition=definition.whole,
        revision=revision,
        origin=origin,
        created_at=_WRITTEN_BY_THE_DATABASE,
        updated_at=_WRITTEN_BY_THE_DATABASE,
        source=source,
        created_by=by,
        previous_revisions=previous_revisions_of(before, revision, recreate=recreate) if before is not None else (),
    )
    if before is not None and all(getattr(row, key) == getattr(before, key) for key in _COMPARED):
        return None
    return row


_COMPARED = ("definition", "revision", "origin", "source", "previous_revisions")


def previous_revisions_of(before: Model, revision: str, *, recreate: bool) -> tuple[str, ...]:
    """Whose replicas may answer until one of `revision` can."""
    if recreate:
        return ()
    if revision == before.revision:
        return before.previous_revisions
    # Nobody knows here whether a replica of the last one ever got ready: those before it may still be the ones at work.
    earlier = dict.fromkeys((before.revision, *before.previous_revisions))
    return tuple(each for each in earlier if each != revision)[:_MOST_FORMERS]


def check_alias(definition: Definition, others: dict[str, str]) -> None:
    """`others`: what every other model is an alias of, empty for real ones. One hop, as the contract has it, so that
    nobody need look for circles."""
    if definition.alias and others.get(definition.alias):
        raise Invalid(f"{definition.alias} is itself an alias, of {others[definition.alias]}: name that one")
    pointing = sorted(name for name, target in others.items() if target == definition.name)
    if definition.alias and pointing:
        raise Invalid(f"{definition.name} cannot become an alias: {', '.join(pointing)} stand for it")
