"""What several commands have in common: options, a yes before something goes, a name nobody knows, one by one."""

from __future__ import annotations

import difflib
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated

import typer

from corral.cli.output import DONE, FAILED, complain, interactive, some, tell
from corral.kit.errors import CorralError

Json = Annotated[bool, typer.Option("--json", help="as JSON, nothing else on stdout")]
Detach = Annotated[bool, typer.Option("--detach", "-d", help="do not stay to watch")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="do not ask")]


def said(context: typer.Context, param: typer.CallbackParam, value: str) -> str:
    """For options that narrow something down: `--node "$NODE"` with nothing in it must not mean every node."""
    source = context.get_parameter_source(param.name or "")
    if source is not None and source.name == "COMMANDLINE" and not value.strip():
        raise typer.BadParameter("is empty: leave it out, or say which")
    return value


def confirm(what: str) -> None:
    if not interactive():
        raise typer.BadParameter(f"nobody to ask here: add --yes to {what}")
    if not typer.confirm(f"Really {what}?", default=False):
        raise typer.Exit(FAILED)


def unknown(noun: str, name: str, known: Sequence[str], *, none: str) -> str:
    """No such thing, and what was probably meant. `none`: what to say when there is nothing at all."""
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    if close:
        return f"no {noun} {name!r}: did you mean {' or '.join(close)}?"
    if known:
        return f"no {noun} {name!r}: there are {some(sorted(known))}"
    return f"no {noun} {name!r}: {none}"


async def each_in_turn(names: Sequence[str], act: Callable[[str], Awaitable[str]]) -> int:
    """One after the other, so that the lines come in the order of the names; one that fails does not stop the rest."""
    code = DONE
    for name in dict.fromkeys(names):
        try:
            tell(await act(name))
        except CorralError as error:
            complain(error.message)
            code = FAILED
    return code
