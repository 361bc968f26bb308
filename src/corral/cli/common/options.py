"""Options, questions and messages that several commands share, so that the same option has the same text everywhere."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from corral.cli.commands import CONTEXT_HELP
from corral.cli.common import declare
from corral.cli.common.output import (
    DONE,
    FAILED,
    abbreviate,
    is_interactive,
    print_error,
    print_line,
    print_note,
    printable,
)
from corral.kit.errors import CorralError
from corral.kit.humanize import similar_names

if TYPE_CHECKING:
    from corral.client import Client

NO_MATCH = "No gallery has an entry that matches."
NO_MATCH_IN_READABLE_GALLERIES = "No gallery that can be read has an entry that matches."
Json = Annotated[bool, declare.Option("--json", help="print JSON and nothing else on stdout")]
Detach = Annotated[bool, declare.Option("--detach", "-d", help="return at once instead of showing the progress")]
Yes = Annotated[bool, declare.Option("--yes", "-y", help="do not ask for confirmation")]
DryRun = Annotated[bool, declare.Option("--dry-run", help="only show what would change")]
Data = Annotated[str | None, declare.Option("--data", metavar="PATH", help="data folder of the fleet (CORRAL_DATA)")]
Url = Annotated[str | None, declare.Option("--url", metavar="URL", help="URL of the fleet (CORRAL_URL)")]
Key = Annotated[
    str | None,
    declare.Option(
        "--key", metavar="KEY", help="API key; CORRAL_KEY and CORRAL_KEY_FILE keep it out of the process list"
    ),
]
Ca = Annotated[
    str | None, declare.Option("--ca", metavar="CA", help="CA of the fleet: PEM file or sha256:… (CORRAL_CA)")
]
Context = Annotated[str | None, declare.Option("--context", metavar="NAME", help=CONTEXT_HELP)]


def reject_empty(context: declare.Context, param: declare.Parameter, value: str) -> str:
    """Refuse an option that was given without a value: `--node "$NODE"` with NODE unset must not mean every node."""
    source = context.get_parameter_source(param.name or "")
    if source is not None and source.name == "COMMANDLINE" and not value.strip():
        raise declare.BadParameter("the value is empty: give one, or remove the option")
    return value


def confirm(action: str) -> None:
    """Ask before `action` (`delete attic`). Without a terminal to ask on, refuse and name --yes."""
    if not is_interactive():
        raise declare.BadParameter(f"cannot ask for confirmation without a terminal: add --yes to {action}")
    if not declare.confirm(f"Really {action}?", default=False):
        raise declare.Exit(FAILED)


async def note_unread_galleries(client: Client, kind: str) -> bool:
    """Print one note for each gallery of `backends` or `models` that cannot be read. True if there was one."""
    try:
        notices = [each.notice for each in await client.galleries() if each.kind == kind and each.notice]
    except CorralError as error:  # the answer is here; only the note about possible gaps in it is missing
        notices = [f"Cannot check whether every gallery can be read: {error.message}"]
    for each in dict.fromkeys(notices):
        print_note(printable(each))
    if notices:
        print_note("What to check: `corral doctor`.")
    return bool(notices)


def unknown_name(noun: str, name: str, known: Sequence[str], *, none: str) -> str:
    """Say that there is no such thing, and suggest close matches. `none`: the hint when nothing is known at all."""
    close = similar_names(name, known, cutoff=0.5)
    if close:
        return f"no {noun} {name!r}: did you mean {' or '.join(close)}?"
    if known:
        return f"no {noun} {name!r}: the {noun}s are {abbreviate(sorted(known))}"
    return f"no {noun} {name!r}: {none}"


async def run_for_each(names: Sequence[str], act: Callable[[str], Awaitable[str]]) -> int:
    """Run `act` for one name after the other and print its result. A failure does not stop the rest."""
    code = DONE
    for name in dict.fromkeys(names):
        try:
            print_line(await act(name))
        except CorralError as error:
            print_error(error.message)
            code = FAILED
    return code


MaxErrors = Annotated[
    str,
    declare.Option(
        "--max-errors", metavar="SHARE", help="with --soak: how much the share of failed requests may rise [2%]"
    ),
]
MaxSlowdown = Annotated[
    float | None,
    declare.Option(
        "--max-slowdown", metavar="TIMES", help="with --soak: how many times as slow the median may be [1.5]"
    ),
]
MinRequests = Annotated[
    int | None,
    declare.Option("--min-requests", metavar="N", help="with --soak: requests of the old and the new to judge by [20]"),
]


def soak_fields(*, soak: str, max_errors: str, max_slowdown: float | None, min_requests: int | None) -> dict[str, Any]:
    """The options of a soak that were given, as fields of the request."""
    trial = {"soak": soak, "max_errors": max_errors, "max_slowdown": max_slowdown, "min_requests": min_requests}
    for name in ("max_slowdown", "min_requests"):
        value = trial[name]
        if isinstance(value, int | float) and value <= 0:
            raise declare.BadParameter(f"--{name.replace('_', '-')} must be more than 0")
    return {name: value for name, value in trial.items() if value}
