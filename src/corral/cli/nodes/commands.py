"""`corral nodes …`: the machines of the fleet."""

from __future__ import annotations

import asyncio
import shlex
import time
from collections.abc import Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Annotated

from corral.cli.common import declare
from corral.cli.common.fleet_command import destructive_command, destructive_if_given, fleet_command
from corral.cli.common.options import Json, Yes, confirm, run_for_each
from corral.cli.common.output import (
    DONE,
    STILL_RUNNING,
    console,
    is_interactive,
    print_error,
    print_json,
    print_line,
    print_note,
    print_table,
)
from corral.cli.nodes import text as node_text
from corral.kit.durations import parse_duration_s
from corral.kit.errors import NotFound

if TYPE_CHECKING:
    from corral.client import Client
    from corral.contract.admin import NodeView

app = declare.App(
    help="""List, approve, drain, label and delete nodes.

    \b
    Examples:
      corral nodes list
      corral nodes approve workshop
      corral nodes drain workshop --wait 5m
    """,
)
POLL_S = 0.5
MIN_IDLE_S = 1.5
Node = Annotated[str, declare.Argument(metavar="NODE", help="name or id of the node")]
Names = Annotated[list[str], declare.Argument(metavar="NODE", help="names or ids of nodes")]
MaybeNames = Annotated[list[str] | None, declare.Argument(metavar="NODE", help="names or ids of nodes")]


@app.command("list")
@fleet_command
async def list_nodes(
    client: Client,
    as_json: Json = False,
    status: Annotated[
        str | None,
        declare.Option(
            "--status", metavar="STATUS", help="only nodes with this status, such as healthy, pending or offline"
        ),
    ] = None,
    watch: Annotated[bool, declare.Option("--watch", "-w", help="show every change until Ctrl-C")] = False,
) -> int:
    """List the nodes of the fleet.

    \b
    Examples:
      corral nodes list
      corral nodes list --status pending
      corral nodes list --json | jq -r '.[] | select(.status == "offline") | .name'
      corral nodes list --watch
    """
    from corral.contract.messages.nodes import NodeStatus

    if status is not None and status not in tuple(NodeStatus):
        raise declare.BadParameter(f"--status: {status!r} is not a status: choose {', '.join(NodeStatus)}")
    if watch:
        return await _watch(client, status, as_json=as_json)
    nodes = [node for node in await client.nodes.list() if status in (None, node.status)]
    if as_json:
        print_json(nodes)
    else:
        empty = f"No {status} nodes." if status else node_text.NO_NODES
        print_table(node_text.COLUMNS, [node_text.row(node) for node in nodes], empty=empty)
    return DONE


async def _watch(client: Client, status: str | None, *, as_json: bool) -> int:
    """Ctrl-C is the normal end of a watch, so the exit code is 0."""
    try:
        if is_interactive() and not as_json:
            await _watch_on_screen(client, status)
        else:
            await _watch_as_lines(client, status, as_json=as_json)
    except asyncio.CancelledError:
        pass
    return DONE


async def _watch_on_screen(client: Client, status: str | None) -> None:
    from rich.live import Live

    from corral.cli.nodes.board import NodeBoard, screen

    board = NodeBoard()
    with Live(console=console(), auto_refresh=False) as live:
        async with aclosing(client.follow()) as events:
            async for event in events:
                if board.apply(event):
                    live.update(screen(board.nodes(), status), refresh=True)


async def _watch_as_lines(client: Client, status: str | None, *, as_json: bool) -> None:
    from corral.cli.nodes.board import NodeBoard

    board = NodeBoard()
    async with aclosing(client.follow()) as events:
        async for event in events:
            for change in board.changes(event):
                if status not in (None, change.after, change.before):
                    continue
                if as_json:
                    print_json(change.as_data(), indent=None)
                else:
                    print_line(change.line())


@app.command("show")
@fleet_command
async def show_node(client: Client, node: Node, as_json: Json = False) -> None:
    """Show one node, with the reason for its status.

    \b
    Examples:
      corral nodes show workshop
    """
    view = await _find(client, node)
    if as_json:
        print_json(view)
    else:
        for line in node_text.details(view):
            print_line(line)


@app.command("approve")
@fleet_command
async def approve_nodes(
    client: Client,
    names: MaybeNames = None,
    all_pending: Annotated[bool, declare.Option("--all-pending", help="approve every pending node")] = False,
) -> int:
    """Admit pending machines to the fleet.

    \b
    Examples:
      corral nodes approve workshop attic
      corral nodes approve --all-pending
    """
    if all_pending == bool(names):
        raise declare.BadParameter("give either names of nodes or --all-pending")
    if all_pending:
        names = [node.id for node in await client.nodes.list() if node.status == "pending"]
        if not names:
            print_note("No node is pending.")
            return DONE

    async def approve(name: str) -> str:
        view = await _find(client, name)
        if view.status != "pending":
            return f"{view.name} is already {view.status}"
        approved = await client.nodes.approve(view.id)
        return f"{approved.name or view.name} approved: {approved.status or 'healthy'}"

    return await run_for_each(names or [], approve)


@app.command("drain")
@destructive_command
async def drain_nodes(
    client: Client,
    names: Names,
    wait: Annotated[
        str | None,
        declare.Option(
            "--wait",
            metavar="DURATION",
            help="wait until the requests on the node have ended, at most this long (then exit 3)",
        ),
    ] = None,
) -> int:
    """Drain nodes: send them no new requests and no new replicas. Running requests end normally.

    \b
    Examples:
      corral nodes drain workshop
      corral nodes drain workshop --wait 5m
    """
    budget_s = _seconds(wait) if wait else None

    async def drain(name: str) -> str:
        view = await _find(client, name)
        await client.nodes.drain(view.id)
        return f"{view.name} is draining. To use it again: `corral nodes resume {shlex.quote(view.name)}`"

    code = await run_for_each(names, drain)
    return code if code or budget_s is None else await _until_idle(client, names, budget_s)


async def _until_idle(client: Client, names: Sequence[str], budget_s: float) -> int:
    """Wait until each node has been idle for `MIN_IDLE_S`: a gateway may have sent a request before it learned of the
    drain, and the ingress reports requests with a short delay."""
    deadline_s = time.monotonic() + budget_s
    for name in names:
        idle_since_s: float | None = None
        while idle_since_s is None or time.monotonic() - idle_since_s < MIN_IDLE_S:
            view = await _find(client, name)
            is_idle = not view.in_flight_count and not view.in_flight_unknown
            idle_since_s = (idle_since_s or time.monotonic()) if is_idle else None
            if time.monotonic() > deadline_s:
                if is_idle:  # but for less than MIN_IDLE_S
                    print_error(f"{view.name} became idle only at the end of --wait: wait longer to be sure")
                else:
                    print_error(f"{node_text.busy_reason(view)}; see `corral nodes show {shlex.quote(view.name)}`")
                return STILL_RUNNING
            await asyncio.sleep(POLL_S)
        print_line(f"{view.name} is idle.")
    return DONE


@app.command("resume")
@fleet_command
async def resume_nodes(client: Client, names: Names) -> int:
    """Use drained nodes again.

    \b
    Examples:
      corral nodes resume workshop
    """

    async def resume(name: str) -> str:
        view = await _find(client, name)
        await client.nodes.resume(view.id)
        return f"{view.name} accepts new requests and replicas again."

    return await run_for_each(names, resume)


@app.command("delete")
@destructive_command
async def delete_nodes(
    client: Client,
    names: Names,
    yes: Yes = False,
) -> int:
    """Delete nodes from the fleet. Their credentials stop working at once.

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

    return await run_for_each([view.id for view in views], delete)


@app.command("replace")
@destructive_command
async def replace_node(client: Client, node: Node) -> None:
    """Let another machine take over the name of a node. Use this for a machine that was reinstalled or exchanged.

    \b
    Examples:
      corral nodes replace workshop
    """
    view = await _find(client, node)
    await client.nodes.replace(view.id)
    print_line(
        f"{view.name}: the next machine that joins with this name replaces it. Join command: `corral token create`"
    )


@app.command("label", ignore_unknown_options=True)
@destructive_if_given("changes")
async def label_node(
    client: Client,
    node: Node,
    changes: Annotated[
        list[str] | None,
        declare.Argument(metavar="KEY=VALUE|KEY-", help="KEY=VALUE sets a label, KEY- removes it"),
    ] = None,
    as_json: Json = False,
) -> int:
    """Set or remove labels of a node. Without labels, show them.

    \b
    Examples:
      corral nodes label workshop tier=fast room=cellar
      corral nodes label workshop room-
    """
    added, removed = node_text.read_label_changes(changes or [])
    view = await _find(client, node)
    if added:
        await client.nodes.merge_labels(view.id, added)
    for key in removed:
        await client.nodes.remove_label(view.id, key)
    labels = await client.nodes.labels(view.id)
    if as_json:
        print_json(labels)
    else:
        for key in sorted(labels):
            print_line(f"{key}={labels[key]}")
    return DONE


@app.command("budget")
@destructive_command
async def budget_node(
    client: Client,
    node: Node,
    value: Annotated[
        str | None,
        declare.Argument(metavar="AMOUNT", help="80%, 0.8, 12GB or 12GiB (at most 1 PiB); 0 for no limit"),
    ] = None,
    reset: Annotated[bool, declare.Option("--reset", help="use the value that the worker reports")] = False,
) -> None:
    """Limit the GPU memory that replicas can use on a node.

    \b
    Examples:
      corral nodes budget workshop 80%
      corral nodes budget workshop --reset
    """
    if reset == (value is not None):
        raise declare.BadParameter("give either an amount such as 80% or 12GB, or --reset")
    if value is not None and not value.strip():
        raise declare.BadParameter("the amount is empty: give one such as 80% or 12GB, 0 for no limit, or --reset")
    view = await _find(client, node)
    if value is None:
        await client.nodes.reset_budget(view.id)
        print_line(f"{view.name}: the GPU memory budget of the worker applies from its next registration on.")
        return
    await client.nodes.set_budget(view.id, value)
    print_line(f"{view.name}: the GPU memory budget is {value}.")


@app.command("max-replicas")
@destructive_command
async def max_replicas_node(
    client: Client,
    node: Node,
    value: Annotated[
        int | None, declare.Argument(metavar="N", min=1, max=1000, help="maximum replicas of one model")
    ] = None,
    reset: Annotated[bool, declare.Option("--reset", help="use the value that the worker reports")] = False,
) -> None:
    """Limit the number of replicas of one model on a node.

    \b
    Examples:
      corral nodes max-replicas workshop 4
      corral nodes max-replicas workshop --reset
    """
    if reset == (value is not None):
        raise declare.BadParameter("give either a number or --reset")
    view = await _find(client, node)
    if value is None:
        await client.nodes.reset_max_replicas(view.id)
        print_line(f"{view.name}: the replica limit of the worker applies from its next registration on.")
        return
    await client.nodes.set_max_replicas(view.id, value)
    print_line(f"{view.name}: at most {value} replica{'s' if value > 1 else ''} of one model.")


async def _find(client: Client, name: str) -> NodeView:
    try:
        return await client.nodes.get(name)
    except NotFound as error:
        known = [node.name for node in await client.nodes.list()]
        raise NotFound(node_text.unknown_node(name, known)) from error


def _seconds(text: str) -> float:
    try:
        return parse_duration_s(text)
    except ValueError as error:
        raise declare.BadParameter(str(error)) from error
