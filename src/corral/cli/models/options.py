"""Options of the commands that take definitions of models, and what they read and print in common."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from corral.cli.common import declare
from corral.cli.common.output import print_line, print_note, printable
from corral.cli.models import text as model_text
from corral.kit.errors import Invalid

if TYPE_CHECKING:
    from corral.contract.catalogue import ModelChanged

File = Annotated[str, declare.Option("--file", "-f", metavar="FILE", help="YAML file with definitions; - reads stdin")]
Set = Annotated[
    list[str] | None, declare.Option("--set", metavar="KEY=VALUE", help="set a key of the definition; can be repeated")
]
Recreate = Annotated[
    bool, declare.Option("--recreate", help="stop the old replicas at once instead of when a new one is ready")
]


def changes_of(sets: Sequence[str] | None, unset: Sequence[str] | None) -> dict[str, Any]:
    try:
        return model_text.changes_of(sets or (), unset or ())
    except ValueError as error:
        raise declare.BadParameter(str(error)) from error


def read_text(file: str) -> str:
    try:
        text = sys.stdin.read() if file == "-" else Path(file).expanduser().read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise Invalid(f"{file} is not a UTF-8 text file") from error
    if not text.strip():
        raise Invalid(f"{'stdin' if file == '-' else file} is empty")
    return text


def read_documents(file: str) -> list[str]:
    try:
        return model_text.documents(read_text(file))
    except ValueError as error:
        raise Invalid(f"{'stdin' if file == '-' else file}: {error}") from error


def print_change(changed: ModelChanged) -> None:
    print_line(printable(changed.message))
    for each in changed.notes:
        print_note(f"Note: {printable(each)}")
    if changed.pending_cleanup:
        print_note("Replicas with the old definition still run; they stop by themselves.")
