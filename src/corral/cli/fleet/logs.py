"""`corral logs MODEL[@NODE]`: the log of the processes of a model or a backend, from all nodes or from one; with
`--worker` what the worker of a node logs itself."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING, Annotated

from corral.cli.common import declare
from corral.cli.common.fleet_command import fleet_command
from corral.cli.common.options import Json
from corral.cli.common.output import DONE, FAILED, log_line, print_error, print_json, print_line, print_note, printable
from corral.kit.errors import CorralError, Invalid, NotFound

if TYPE_CHECKING:
    from corral.client import Client
    from corral.client.resources.logs import LogLine

app = declare.App()
MAX_LINES = 100_000


@app.command("logs")
@fleet_command
async def show_logs(
    client: Client,
    what: Annotated[
        str | None,
        declare.Argument(
            metavar="MODEL[#N][@NODE]",
            help="a model, a replica of a model (#N) or a backend; on every node or on one (@NODE)",
        ),
    ] = None,
    node: Annotated[
        str | None, declare.Option("--node", metavar="NODE", help="only this node; the same as @NODE")
    ] = None,
    worker: Annotated[
        bool, declare.Option("--worker", help="what the worker of the node logs itself; needs --node")
    ] = False,
    follow: Annotated[bool, declare.Option("--follow", "-f", help="print new lines until Ctrl-C")] = False,
    tail: Annotated[
        int, declare.Option("--tail", "-n", metavar="N", min=0, max=MAX_LINES, help="number of last lines to print")
    ] = 100,
    as_json: Json = False,
) -> int:
    """Print the log of the processes of a model or a backend, or of a node's worker.

    \b
    Examples:
      corral logs smollm2-135m
      corral logs smollm2-135m@barn -f
      corral logs "smollm2-135m#1" --tail 20
      corral logs --node barn --worker -f
    """
    name, place = parse_source(what, node, worker=worker)
    nodes = [place] if place else await _find_nodes(client, name)
    if not nodes:
        raise NotFound(
            f"no node that answers has a log of {name!r}; `corral models list` and `corral backends list` list names"
        )
    several = len(nodes) > 1
    if not follow:
        shown = [await _last(client, each, name, tail, several=several, as_json=as_json) for each in nodes]
        if tail and not any(shown) and None not in shown:
            raise NotFound(f"the log of {repr(name) if name else 'the worker'} is empty on {', '.join(nodes)}")
        return FAILED if None in shown else DONE
    try:
        await asyncio.gather(*(_follow(client, each, name, tail, several=several, as_json=as_json) for each in nodes))
    except asyncio.CancelledError:
        return DONE  # Ctrl-C is the normal end
    print_note("The log has ended.")
    return DONE


def parse_source(what: str | None, node: str | None, *, worker: bool) -> tuple[str, str]:
    """The name of the log (empty: the worker's own) and the node (empty: every node with such a log)."""
    if worker:
        if what is not None:
            raise Invalid("give a model or --worker, not both: the log of a worker is not the log of a model")
        if not (node or "").strip():
            raise Invalid("--worker needs a node: corral logs --node NAME --worker; `corral nodes list` lists them")
        return "", node or ""
    name, at, place = what.rpartition("@") if what and "@" in what else (what or "", "", "")
    if not name.strip() or (at and not place.strip()):
        raise Invalid("give the name of a model or a backend (MODEL, MODEL#N or MODEL@NODE), or --node NAME --worker")
    if node and place and node != place:
        raise Invalid(f"the log is either on {place} or on {node}: give one of @{place} and --node {node}")
    return name, place or node or ""


async def _find_nodes(client: Client, name: str) -> list[str]:
    """The nodes with a log of this name. A node that does not answer is reported and left out."""
    nodes = [node for node in await client.nodes.list() if node.status in ("healthy", "draining", "unhealthy")]
    model = name.partition("#")[0]

    async def has_log(node: str) -> bool:
        try:
            names = await client.logs.names(node)
        except CorralError as error:
            print_error(error.message)
            return False
        return any(each.partition("#")[0] == model for each in names)

    found = await asyncio.gather(*(has_log(node.name) for node in nodes))
    return [node.name for node, has in zip(nodes, found, strict=True) if has]


async def _last(client: Client, node: str, name: str, tail: int, *, several: bool, as_json: bool) -> int | None:
    """Print the last lines and return their number; None if the node did not answer."""
    try:
        lines = await client.logs.last(node, name, tail)
    except CorralError as error:
        print_error(error.message)
        return None
    for line in lines:
        _show(node, line, several=several, timed=not name, as_json=as_json)
    return len(lines)


async def _follow(client: Client, node: str, name: str, tail: int, *, several: bool, as_json: bool) -> None:
    async with aclosing(client.logs.follow(node, name, tail)) as lines:
        async for line in lines:
            _show(node, line, several=several, timed=not name, as_json=as_json)


def _show(node: str, line: LogLine, *, several: bool, timed: bool, as_json: bool) -> None:
    """`timed`: with the time, which most backends write themselves and a worker does not."""
    if as_json:
        data = {"node": node, "timestamp": line.timestamp, "stream": line.stream, "text": line.text}
        print_json(data, indent=None)
    else:
        print_line((f"{node}: " if several else "") + printable(log_line(line, timed=timed).replace("\t", "    ")))
