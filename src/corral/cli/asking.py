"""What several commands have in common: options, a yes before something goes, a name nobody knows, one by one."""

from __future__ import annotations

import difflib
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from corral.cli.output import DONE, FAILED, complain, interactive, plain, remark, some, tell
from corral.kit.errors import CorralError

if TYPE_CHECKING:
    from corral.client import Client

NOTHING_FITS = "nothing like that in any gallery"
NOTHING_FITS_IN_THE_REST = "nothing like that in the galleries that can be read"
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


async def remark_unread_galleries(client: Client, kind: str) -> bool:
    """One sentence for each gallery of `backends` or `models` that cannot be read. Whether there was one."""
    try:
        notices = [each.notice for each in await client.galleries() if each.kind == kind and each.notice]
    except CorralError as error:  # the answer itself is there: what may be missing in it is only a remark
        notices = [f"whether all galleries can be read is not known: {error.message}"]
    for each in notices:
        remark(plain(each))
    return bool(notices)


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
