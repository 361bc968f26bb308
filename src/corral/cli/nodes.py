"""`corral nodes …`: the machines of the fleet."""

from __future__ import annotations

import asyncio
import shlex
import time
from collections.abc import Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Annotated

import typer

from corral.cli import node_text
from corral.cli.asking import Json, Yes, confirm, each_in_turn
from corral.cli.output import (
    DONE,
    UNDER_WAY,
    complain,
    console,
    interactive,
    print_json,
    print_table,
    remark,
    tell,
)
from corral.cli.remote import remote, remote_destructive, remote_destructive_with
from corral.kit.durations import parse_duration_s
from corral.kit.errors import NotFound

if TYPE_CHECKING:
    from corral.client import Client
    from corral.contract.admin import NodeView

app = typer.Typer(
    rich_markup_mode=None,
    add_completion=False,
    no_args_is_help=True,
    help="The machines of the fleet: list, approve, drain, label, delete.",
)
POLL_S = 0.5
IDLE_FOR_S = 1.5
Node = Annotated[str, typer.Argument(metavar="NODE", help="name or id", show_default=False)]
Names = Annotated[list[str], typer.Argument(metavar="NODE...", help="names or ids", show_default=False)]
MaybeNames = Annotated[list[str] | None, typer.Argument(metavar="[NODE...]", help="names or ids", show_default=False)]


@app.command("list")
@remote
async def list_nodes(
    client: Client,
    as_json: Json = False,
    status: Annotated[str | None, typer.Option("--status", metavar="STATUS", help="only nodes of this status")] = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="stay and show every change; Ctrl-C leaves")] = False,
) -> int:
    """List the nodes of the fleet.

    \b
    Examples:
      corral nodes list
      corral nodes list --status pending
      corral nodes list --json | jq -r '.[] | select(.status == "offline") | .name'
      corral nodes list --watch
    """
    if watch:
        return await _watch(client, status, as_json=as_json)
    nodes = [node for node in await client.nodes.list() if status in (None, node.status)]
    if as_json:
        print_json(nodes)
    else:
        empty = f"no {status} nodes" if status else "no nodes yet: `corral token create` prints the line that adds one"
        print_table(node_text.COLUMNS, [node_text.row(node) for node in nodes], empty=empty)
    return DONE


async def _watch(client: Client, status: str | None, *, as_json: bool) -> int:
    """Ctrl-C is how one leaves a watch: that is done, not interrupted."""
    try:
        if interactive() and not as_json:
            await _watch_on_screen(client, status)
        else:
            await _watch_as_lines(client, status, as_json=as_json)
    except asyncio.CancelledError:
        pass
    return DONE


async def _watch_on_screen(client: Client, status: str | None) -> None:
    from rich.live import Live

    board = node_text.Board()
    screen = console()
    with Live(console=screen, auto_refresh=False) as live:
        async with aclosing(client.follow()) as events:
            async for event in events:
                if board.take(event):
                    live.update(node_text.screen(board.nodes(), status), refresh=True)


async def _watch_as_lines(client: Client, status: str | None, *, as_json: bool) -> None:
    board = node_text.Board()
    async with aclosing(client.follow()) as events:
        async for event in events:
            for change in board.changes(event):
                if status not in (None, change.after, change.before):
                    continue
                if as_json:
                    print_json(change.as_data(), indent=None)
                else:
                    tell(change.line())


@app.command("show")
@remote
async def show_node(client: Client, node: Node, as_json: Json = False) -> None:
    """Show one node, and why it is as it is.

    \b
    Examples:
      corral nodes show workshop
    """
    view = await _find(client, node)
    if as_json:
        print_json(view)
    else:
        for line in node_text.details(view):
            tell(line)


@app.command("approve")
@remote
async def approve_nodes(
    client: Client,
    names: MaybeNames = None,
    all_pending: Annotated[bool, typer.Option("--all-pending", help="every node that waits for approval")] = False,
) -> int:
    """Let waiting machines in.

    \b
    Examples:
      corral nodes approve workshop attic
      corral nodes approve --all-pending
    """
    if all_pending == bool(names):
        raise typer.BadParameter("give names of nodes, or --all-pending")
    if all_pending:
        names = [node.id for node in await client.nodes.list() if node.status == "pending"]
        if not names:
            remark("nothing waits for approval")
            return DONE

    async def approve(name: str) -> str:
        view = await _find(client, name)
        if view.status != "pending":
            return f"{view.name} is already {view.status}"
        approved = await client.nodes.approve(view.id)
        return f"{approved.name or view.name} approved: {approved.status or 'healthy'}"

    return await each_in_turn(names or [], approve)


@app.command("drain")
@remote_destructive
async def drain_nodes(
    client: Client,
    names: Names,
    wait: Annotated[
        str | None,
        typer.Option("--wait", metavar="SPAN", help="stay until its requests have ended, at most so long (exit 3)"),
    ] = None,
) -> int:
    """Give a node no new work; what it is doing may end.

    \b
    Examples:
      corral nodes drain workshop
      corral nodes drain workshop --wait 5m
    """
    budget_s = _span(wait) if wait else None

    async def drain(name: str) -> str:
        view = await _find(client, name)
        await client.nodes.drain(view.id)
        return f"{view.name} is draining; `corral nodes resume {shlex.quote(view.name)}` brings it back"

    code = await each_in_turn(names, drain)
    return code if code or budget_s is None else await _until_idle(client, names, budget_s)


async def _until_idle(client: Client, names: Sequence[str], budget_s: float) -> int:
    """A node counts as idle once it was idle for a while: gateways may have sent it a request before they knew that it
    drains, and its ingress reports requests a moment after they came."""
    deadline_s = time.monotonic() + budget_s
    for name in names:
        idle_since_s: float | None = None
        while idle_since_s is None or time.monotonic() - idle_since_s < IDLE_FOR_S:
            view = await _find(client, name)
            is_idle = not view.in_flight_count and not view.in_flight_unknown
            idle_since_s = (idle_since_s or time.monotonic()) if is_idle else None
            if time.monotonic() > deadline_s:
                if is_idle:  # for less than it takes to be sure
                    complain(f"{view.name} is idle, but not for long enough to be sure: give --wait more time")
                else:
                    complain(f"{node_text.under_way(view)}; look with `corral nodes show {shlex.quote(view.name)}`")
                return UNDER_WAY
            await asyncio.sleep(POLL_S)
        tell(f"{view.name} has nothing left to do")
    return DONE


@app.command("resume")
@remote
async def resume_nodes(client: Client, names: Names) -> int:
    """Give a drained node work again.

    \b
    Examples:
      corral nodes resume workshop
    """

    async def resume(name: str) -> str:
        view = await _find(client, name)
        await client.nodes.resume(view.id)
        return f"{view.name} takes work again"

    return await each_in_turn(names, resume)


@app.command("delete")
@remote_destructive
async def delete_nodes(
    client: Client,
    names: Names,
    yes: Yes = False,
) -> int:
    """Take machines out of the fleet. Their credentials stop working at once.

    \b
    Examples:
      corral nodes delete attic
      corral nodes delete attic cellar --yes
    """
    views = [await _find(client, name) for name in names]
    if not yes:
        confirm("delete " + ", ".join(f"{view.name} ({view.status})" for view in views))

    async def delete(name: str) -> str:
        await client.nodes.delete(name)
        return f"{next(view.name for view in views if view.id == name)} deleted"

    return await each_in_turn([view.id for view in views], delete)


@app.command("replace")
@remote_destructive
async def replace_node(client: Client, node: Node) -> None:
    """Let another machine take over a node's name: for a reinstalled or exchanged machine.

    \b
    Examples:
      corral nodes replace workshop
    """
    view = await _find(client, node)
    await client.nodes.replace(view.id)
    tell(f"{view.name}: the next machine that joins under this name takes its place (`corral token create` for a line)")


@app.command("label", context_settings={"ignore_unknown_options": True})
@remote_destructive_with("changes")
async def label_node(
    client: Client,
    node: Node,
    changes: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE | KEY-]...", help="set, or remove", show_default=False)
    ] = None,
    as_json: Json = False,
) -> int:
    """Set and remove labels; without any, show them.

    \b
    Examples:
      corral nodes label workshop tier=fast room=cellar
      corral nodes label workshop room-
    """
    wanted, unwanted = node_text.read_label_changes(changes or [])
    view = await _find(client, node)
    if wanted:
        await client.nodes.merge_labels(view.id, wanted)
    for key in unwanted:
        await client.nodes.remove_label(view.id, key)
    labels = await client.nodes.labels(view.id)
    if as_json:
        print_json(labels)
    else:
        for key in sorted(labels):
            tell(f"{key}={labels[key]}")
    return DONE


@app.command("budget")
@remote_destructive
async def budget_node(
    client: Client,
    node: Node,
    value: Annotated[
        str | None, typer.Argument(metavar="[AMOUNT]", help="80%, 0.8, 12GB, 12GiB; 0 = no cap", show_default=False)
    ] = None,
    reset: Annotated[bool, typer.Option("--reset", help="back to what the worker itself says")] = False,
) -> None:
    """Cap the GPU memory that may be used on a node.

    \b
    Examples:
      corral nodes budget workshop 80%
      corral nodes budget workshop --reset
    """
    if reset == (value is not None):
        raise typer.BadParameter("give an amount such as 80% or 12GB, or --reset")
    view = await _find(client, node)
    if value is None:
        await client.nodes.reset_budget(view.id)
        tell(f"{view.name}: GPU memory as the worker itself says, from its next registration on")
        return
    await client.nodes.set_budget(view.id, value)
    tell(f"{view.name}: GPU memory budget is {value}")


@app.command("max-replicas")
@remote_destructive
async def max_replicas_node(
    client: Client,
    node: Node,
    value: Annotated[
        int | None, typer.Argument(metavar="[N]", min=1, help="replicas of one model", show_default=False)
    ] = None,
    reset: Annotated[bool, typer.Option("--reset", help="back to what the worker itself says")] = False,
) -> None:
    """Set how many replicas of one model a node may hold.

    \b
    Examples:
      corral nodes max-replicas workshop 4
      corral nodes max-replicas workshop --reset
    """
    if reset == (value is not None):
        raise typer.BadParameter("give a number, or --reset")
    view = await _find(client, node)
    if value is None:
        await client.nodes.reset_max_replicas(view.id)
        tell(f"{view.name}: replicas per model as the worker itself says, from its next registration on")
        return
    await client.nodes.set_max_replicas(view.id, value)
    tell(f"{view.name}: at most {value} replica{'s' if value > 1 else ''} of one model")


async def _find(client: Client, name: str) -> NodeView:
    try:
        return await client.nodes.get(name)
    except NotFound as error:
        known = [node.name for node in await client.nodes.list()]
        raise NotFound(node_text.unknown(name, known)) from error


def _span(text: str) -> float:
    try:
        return parse_duration_s(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
