"""Commands that talk to a fleet: they get a connected client, and every one of them takes --url, --key and --ca."""

from __future__ import annotations

import asyncio
import inspect
import os
import typing
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Concatenate, ParamSpec

import typer

from corral.cli.asking import Yes, confirm
from corral.cli.folder import DataFolder
from corral.cli.options import with_parameters
from corral.cli.output import interactive, plain, remark
from corral.kit.locks import holder_of

if TYPE_CHECKING:
    from corral.client import Client, Endpoint

TAKES_AWAY = "takes_away"
P = ParamSpec("P")
Work = Callable[Concatenate["Client", P], Awaitable[int | None]]
_CONNECTION: dict[str, Any] = {
    "url": Annotated[str | None, typer.Option("--url", metavar="URL", help="where the fleet is (CORRAL_URL)")],
    "key": Annotated[
        str | None,
        typer.Option("--key", metavar="KEY", help="API key; better in CORRAL_KEY or CORRAL_KEY_FILE: others see flags"),
    ],
    "ca": Annotated[
        str | None, typer.Option("--ca", metavar="CA", help="CA of the fleet: PEM file or sha256:… (CORRAL_CA)")
    ],
    "context": Annotated[
        str | None,
        typer.Option(
            "--context", metavar="NAME", help="fleet of this machine, from `corral contexts list` (CORRAL_CONTEXT)"
        ),
    ],
}


def remote(work: Work[P]) -> Callable[..., int]:
    """`async def list_nodes(client, …)` → a command. Its own parameters stay; those of the connection come after."""
    return _command(work, before=lambda endpoint, given: None, more=[])


def remote_destructive(work: Work[P]) -> Callable[..., int]:
    """A command that takes something away: where several fleets run on this machine, it says which one it goes to, and
    goes on only if the person named the fleet, gave --yes or says yes. A command without `--yes` gets one."""
    return _destructive(work, lambda given: not given.get("dry_run"))


def remote_destructive_with(*names: str) -> Callable[[Work[P]], Callable[..., int]]:
    """The same of a command that takes something away only where one of these options or arguments is given."""
    return lambda work: _destructive(work, lambda given: any(given.get(name) for name in names))


def _destructive(work: Work[P], takes_away: Callable[[dict[str, Any]], bool]) -> Callable[..., int]:
    own = inspect.signature(work).parameters
    asks_itself = "yes" in own

    def before(endpoint: Endpoint, given: dict[str, Any]) -> None:
        yes = bool(given.get("yes") if asks_itself else given.pop("yes"))
        if takes_away(given):
            _name_fleet(endpoint, yes=yes, asks_itself=asks_itself)

    more = [] if asks_itself else [_keyword("yes", Yes, False)]
    command = _command(work, before=before, more=more)
    command.__dict__[TAKES_AWAY] = True  # for the test that knows every command
    return command


def _name_fleet(endpoint: Endpoint, *, yes: bool, asks_itself: bool) -> None:
    if not endpoint.others:
        return
    fleet = f"the fleet {endpoint.context!r} ({endpoint.url}, {endpoint.data})"
    others = ", ".join(endpoint.others)
    if not yes and not interactive():
        raise typer.BadParameter(
            f"this would go to {fleet}, not to {others}: name the one you mean with --context, or add --yes"
        )
    remark(plain(f"This goes to {fleet}, not to {others}."))
    if not yes and not asks_itself:
        confirm(f"do this to {endpoint.context}")


def _command(
    work: Work[P], *, before: Callable[[Endpoint, dict[str, Any]], None], more: list[inspect.Parameter]
) -> Callable[..., int]:
    def invoke(**given: Any) -> int:
        from corral.client import Client, find_endpoint

        endpoint = find_endpoint(**{name: given.pop(name) for name in _CONNECTION}, env=os.environ)
        before(endpoint, given)

        async def talk() -> int | None:
            async with Client(endpoint, is_minded=partial(_is_minded, endpoint.data)) as client:
                return await work(client, **given)  # type: ignore[call-arg]

        return asyncio.run(talk()) or 0

    # The client's own type is only known to the type checker here: importing it costs most of a second.
    hints = typing.get_type_hints(work, localns={"Client": object}, include_extras=True)
    own = [
        each.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[each.name])
        for each in inspect.signature(work).parameters.values()
        if each.name != "client"
    ]
    connection = [_keyword(name, annotation, None) for name, annotation in _CONNECTION.items()]
    return with_parameters(invoke, own + more + connection, doc=inspect.getdoc(work) or "")


def _keyword(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _is_minded(data: str) -> bool:
    """Whether a `corral up` on this machine keeps the fleet running: a gateway that ended is soon there again."""
    try:
        return bool(data) and holder_of(DataFolder(Path(data)).lock) is not None
    except OSError:
        return False
