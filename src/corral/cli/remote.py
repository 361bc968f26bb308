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

from corral.cli.folder import DataFolder
from corral.cli.options import with_parameters
from corral.cli.up.lock import holder_of

if TYPE_CHECKING:
    from corral.client import Client

P = ParamSpec("P")
_CONNECTION: dict[str, Any] = {
    "url": Annotated[str | None, typer.Option("--url", metavar="URL", help="where the fleet is (CORRAL_URL)")],
    "key": Annotated[
        str | None,
        typer.Option("--key", metavar="KEY", help="API key; better in CORRAL_KEY or CORRAL_KEY_FILE: others see flags"),
    ],
    "ca": Annotated[
        str | None, typer.Option("--ca", metavar="CA", help="CA of the fleet: PEM file or sha256:… (CORRAL_CA)")
    ],
}


def remote(work: Callable[Concatenate[Client, P], Awaitable[int | None]]) -> Callable[..., int]:
    """`async def list_nodes(client, …)` → a command. Its own parameters stay; those of the connection come after."""

    def invoke(**given: Any) -> int:
        from corral.client import Client, find_endpoint

        endpoint = find_endpoint(**{name: given.pop(name) for name in _CONNECTION}, env=os.environ)

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
    connection = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        for name, annotation in _CONNECTION.items()
    ]
    return with_parameters(invoke, own + connection, doc=inspect.getdoc(work) or "")


def _is_minded(data: str) -> bool:
    """Whether a `corral up` on this machine keeps the fleet running: a gateway that ended is soon there again."""
    try:
        return bool(data) and holder_of(DataFolder(Path(data)).lock) is not None
    except OSError:
        return False
