"""`corral logs MODEL[@NODE]`: what the processes of a model, or of a backend, wrote, wherever they run."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING, Annotated

import typer

from corral.cli.asking import Json
from corral.cli.output import DONE, FAILED, complain, plain, print_json, remark, tell
from corral.cli.remote import remote
from corral.kit.errors import CorralError, Invalid, NotFound

if TYPE_CHECKING:
    from corral.client import Client
    from corral.client.resources.logs import LogLine

app = typer.Typer(rich_markup_mode=None, add_completion=False)
_MOST_LINES = 100_000


@app.command("logs")
@remote
async def show_logs(
    client: Client,
    what: Annotated[
        str,
        typer.Argument(
            metavar="MODEL[#N][@NODE]", help="a model, one replica of it, or a backend; everywhere, or on one node"
        ),
    ],
    follow: Annotated[bool, typer.Option("--follow", "-f", help="go on with each new line; Ctrl-C ends it")] = False,
    tail: Annotated[
        int, typer.Option("--tail", "-n", metavar="N", min=0, max=_MOST_LINES, help="the last so many lines")
    ] = 100,
    as_json: Json = False,
) -> int:
    """Show what the processes of a model wrote.

    \b
    Examples:
      corral logs smollm2-135m
      corral logs smollm2-135m@barn -f
      corral logs "smollm2-135m#1" --tail 20
    """
    name, at, node = what.rpartition("@") if "@" in what else (what, "", "")
    if not name.strip() or (at and not node.strip()):
        raise Invalid("say whose log: MODEL, MODEL#N or MODEL@NODE")
    places = [node] if node else await _places(client, name)
    if not places:
        raise NotFound(f"nothing called {name!r} has written anything on any node that answers")
    several = len(places) > 1
    if not follow:
        shown = [await _last(client, place, name, tail, several=several, as_json=as_json) for place in places]
        if tail and not any(shown) and None not in shown:
            raise NotFound(f"{name!r} has written nothing on {', '.join(places)}")
        return FAILED if None in shown else DONE
    try:
        await asyncio.gather(
            *(_follow(client, place, name, tail, several=several, as_json=as_json) for place in places)
        )
    except asyncio.CancelledError:
        return DONE  # Ctrl-C is how one leaves
    remark("The log has ended.")
    return DONE


async def _places(client: Client, name: str) -> list[str]:
    """Nodes where it wrote something. Those that do not answer are named, and left out."""
    nodes = [node for node in await client.nodes.list() if node.status in ("healthy", "draining", "unhealthy")]
    model = name.partition("#")[0]

    async def wrote(node: str) -> bool:
        try:
            names = await client.logs.names(node)
        except CorralError as error:
            complain(error.message)
            return False
        return any(each.partition("#")[0] == model for each in names)

    found = await asyncio.gather(*(wrote(node.name) for node in nodes))
    return [node.name for node, did in zip(nodes, found, strict=True) if did]


async def _last(client: Client, node: str, name: str, tail: int, *, several: bool, as_json: bool) -> int | None:
    """How many lines there were; None: the node did not tell."""
    try:
        lines = await client.logs.last(node, name, tail)
    except CorralError as error:
        complain(error.message)
        return None
    for line in lines:
        _show(node, line, several=several, as_json=as_json)
    return len(lines)


async def _follow(client: Client, node: str, name: str, tail: int, *, several: bool, as_json: bool) -> None:
    async with aclosing(client.logs.follow(node, name, tail)) as lines:
        async for line in lines:
            _show(node, line, several=several, as_json=as_json)


def _show(node: str, line: LogLine, *, several: bool, as_json: bool) -> None:
    if as_json:
        told = {"node": node, "timestamp": line.timestamp, "stream": line.stream, "text": line.text}
        print_json(told, indent=None)
    else:
        tell((f"{node}: " if several else "") + plain(line.text.replace("\t", "    ")))
