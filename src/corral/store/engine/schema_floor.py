"""Which older versions of Corral may still use a database that a newer one has migrated.

A *before* migration leaves the release before running, so that one may start again. An *after* migration removes what
older releases need. It may say which schema still works with it (`oldest_schema = "0023"`); otherwise none older does.
The database keeps the answer, because an older version does not know later migrations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from corral import __version__
from corral.kit.errors import Invalid
from corral.store.engine.transactions import Transaction

KEY = "schema_floor"  # of `settings_kv`
_AFTER = "after:"
_HAS_TABLE = {
    "sqlite": "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'settings_kv'",
    "postgresql": "SELECT 1 WHERE to_regclass('settings_kv') IS NOT NULL",
}
_VALUE = f"SELECT value FROM settings_kv WHERE key = '{KEY}'"


class SchemaFloor(msgspec.Struct, frozen=True, omit_defaults=True):
    oldest: str  # the lowest schema whose code may use the database
    version: str  # of Corral, which has migrated it
    after: str = ""  # the *after* migration that is the reason, with its first line


@dataclass(frozen=True)
class Step:
    """A migration that was applied."""

    revision: str
    text: str  # the first line of its docstring
    oldest_schema: str = ""

    @property
    def is_after(self) -> bool:
        return self.text.lower().startswith(_AFTER)


def floor_after(found: str, steps: Sequence[Step]) -> SchemaFloor:
    """Of a database with the schema `found`, after these steps."""
    floor = SchemaFloor(found, __version__)
    for step in steps:
        oldest = step.oldest_schema or step.revision
        if step.is_after and oldest >= floor.oldest:
            floor = SchemaFloor(
                oldest, __version__, f"{step.revision} ({step.text[len(_AFTER) :].strip().rstrip('.')})"
            )
    return floor


def decode_floor(value: str | None) -> SchemaFloor | None:
    try:
        return msgspec.json.decode(value, type=SchemaFloor) if value else None
    except msgspec.DecodeError:
        return None


async def read_floor(tx: Transaction) -> SchemaFloor | None:
    """None: no version that records it has migrated this database."""
    if await tx.fetch_one(_HAS_TABLE[tx.kind]) is None:
        return None
    row = await tx.fetch_one(_VALUE)
    return decode_floor(str(row[0])) if row is not None else None


def refuse_newer(found: str | None, wanted: str, floor: SchemaFloor | None) -> None:
    """Raises Invalid if code with the schema `wanted` must not use a database with the schema `found`."""
    if found is None or found <= wanted or (floor is not None and wanted >= floor.oldest):
        return
    message = f"the database has schema {found}, newer than this corral ({wanted}): upgrade corral"
    if floor is not None and floor.after:
        message += f"; {_why(floor)}"
    raise Invalid(message)


def refuse_wheel(version: str, schema: str, floor: SchemaFloor | None) -> None:
    """Raises Invalid for a version of Corral whose controllers could not use the database any more. `schema`: the last
    migration in its wheel; empty: unknown."""
    if floor is None or not schema or schema >= floor.oldest:
        return
    why = _why(floor) if floor.after else f"corral {floor.version} has migrated the database since"
    raise Invalid(
        f"corral {version} (schema {schema}) cannot be installed again: {why}. Versions from schema {floor.oldest} on "
        "can; for an older one, restore a backup that it has made"
    )


def _why(floor: SchemaFloor) -> str:
    return f"corral {floor.version} has removed what it needs, with the *after* migration {floor.after}"
