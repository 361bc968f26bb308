"""Options of the commands that take definitions of models, and what they read and print in common."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from corral.cli.common import declare
from corral.cli.common.options import reject_empty
from corral.cli.common.output import DONE, FAILED, print_error, print_line, print_note, printable
from corral.cli.models import text as model_text
from corral.kit.errors import CorralError, Invalid

if TYPE_CHECKING:
    from corral.contract.catalogue import ModelChanged

T = TypeVar("T")

File = Annotated[str, declare.Option("--file", "-f", metavar="FILE", help="YAML file with definitions; - reads stdin")]
Set = Annotated[
    list[str] | None, declare.Option("--set", metavar="KEY=VALUE", help="set a key of the definition; can be repeated")
]
Recreate = Annotated[
    bool, declare.Option("--recreate", help="stop the old replicas at once instead of when a new one is ready")
]
Soak = Annotated[
    str,
    declare.Option(
        "--soak",
        metavar="TIME|N",
        help="try the new revision on 5 %, 25 % and all of the requests for this time (5m), or for N of them (200)",
        callback=reject_empty,
    ),
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


async def change_each(
    items: Iterable[T], change: Callable[[T], Awaitable[ModelChanged]], *, as_json: bool
) -> tuple[list[ModelChanged], int]:
    """One after the other, with a line for each (as JSON the caller prints the list). A failure does not stop the
    rest."""
    done: list[ModelChanged] = []
    code = DONE
    for each in items:
        try:
            done.append(await change(each))
        except CorralError as error:
            print_error(error.message)
            code = FAILED
            continue
        if not as_json:
            print_change(done[-1])
    return done, code


def print_change(changed: ModelChanged) -> None:
    print_line(printable(changed.message))
    for each in changed.notes:
        print_note(f"Note: {printable(each)}")
    if changed.pending_cleanup:
        print_note("Replicas with the old definition still run; they stop by themselves.")
