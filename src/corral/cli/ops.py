"""`corral ops …`: what was asked of the fleet, how far it is, and the levers."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from corral.cli import operation_text, watching
from corral.cli.asking import Detach, Json, Yes, confirm, each_in_turn, said
from corral.cli.output import DONE, plain, print_json, print_table, remark, tell
from corral.cli.remote import remote, remote_destructive, remote_destructive_with
from corral.kit.errors import Conflict, NotFound

if TYPE_CHECKING:
    from corral.client import Client
    from corral.contract.admin import OperationView, Steered

app = typer.Typer(
    rich_markup_mode=None,
    add_completion=False,
    no_args_is_help=True,
    help="Operations: what was asked of the fleet, and how far each node is.",
)
Operation = Annotated[str, typer.Argument(metavar="ID", help="of the operation, or how it begins", show_default=False)]
Several = Annotated[
    list[str], typer.Argument(metavar="ID...", help="of operations, or how they begin", show_default=False)
]
_ID = re.compile(r"[0-9A-Za-z-]+\Z")  # anything else would be another path of the API
OneNode = Annotated[str, typer.Option("--node", metavar="NODE", help="there only", callback=said)]


@app.command("list")
@remote
async def list_operations(
    client: Client,
    everything: Annotated[bool, typer.Option("--all", help="also those that have ended, without their nodes")] = False,
    as_json: Json = False,
) -> None:
    """List what is under way, waits or fails. In JSON, `operation_id` is the whole of what the column ID begins.

    \b
    Examples:
      corral ops list
      corral ops list --all --json | jq -r '.[].operation_id'
    """
    # What has ended is told in numbers: a year's operations on a large fleet have a row for each node and more.
    views = await client.operations.list(everything=everything, rows=not everything)
    if as_json:
        print_json(views)
        return
    rows = [operation_text.row(view) for view in views]
    print_table(operation_text.COLUMNS, rows, empty="nothing is under way" if not everything else "no operations yet")


@app.command("show")
@remote
async def show_operation(client: Client, operation: Operation, as_json: Json = False) -> None:
    """Show one operation, node by node.

    \b
    Examples:
      corral ops show 3f2a91c0
    """
    view = await find(client, operation)
    if as_json:
        print_json(view)
        return
    for line in operation_text.details(view):
        tell(line)
    tell()
    rows = [operation_text.node_row(each) for each in view.nodes]
    print_table(operation_text.NODE_COLUMNS, rows, empty="no node has to do with it")


@app.command("watch")
@remote
async def watch_operations(
    client: Client,
    operations: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ID...]", help="or how they begin; none = all under way", show_default=False),
    ] = None,
    to_the_end: Annotated[
        bool, typer.Option("--to-the-end", help="stay while nodes are away or failing, until each has ended")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="every change as a line of JSON")] = False,
) -> int:
    """Follow operations until nothing moves any more. Ctrl-C lets go of them; they go on.

    Exit code 0: done. 1: a node is failing. 3: only waiting, for a node that is away, say.

    \b
    Examples:
      corral ops watch 3f2a91c0
      corral ops watch 3f2a91c0 --to-the-end
      corral ops watch --json | jq -r '.message'
    """
    views = [await find(client, each) for each in operations or []]
    views = views or list(await client.operations.list(rows=False))
    if not views:
        remark("nothing is under way")
        return DONE
    ids = [view.job_id for view in views]
    if as_json:
        return await watching.watch_as_json_lines(client, ids, to_the_end=to_the_end)
    return await watching.watch(client, ids, to_the_end=to_the_end)


@app.command("cancel")
@remote_destructive
async def cancel_operations(client: Client, operations: Several, node: OneNode = "") -> int:
    """Take back what was asked, and stop what is being fetched for it.

    What was asked before holds again, also on nodes that were done already: after a cancelled upgrade they go back,
    after a cancelled delete they get it back. What nobody had asked anything about stays as it is.

    \b
    Examples:
      corral ops cancel 3f2a91c0
      corral ops cancel 3f2a91c0 --node attic
    """
    where = f" on {node}" if node else ""
    return await _steer(client, operations, lambda each: client.operations.cancel(each, node=node), f"cancelled{where}")


@app.command("retry")
@remote
async def retry_operations(
    client: Client,
    operations: Several,
    node: OneNode = "",
    detach: Detach = False,
    as_json: Json = False,
) -> int:
    """Try again now what is failing. What was cancelled is asked for anew.

    \b
    Examples:
      corral ops retry 3f2a91c0
      corral ops retry 3f2a91c0 --node attic --detach
    """
    ids = []
    for given in operations:
        view = await find(client, given)
        again = await client.operations.retry(view.job_id, node=node)
        ids.append(again.job_id or view.job_id)
    return await watching.stay(client, ids, detach=detach, as_json=as_json)


@app.command("withdraw")
@remote_destructive
async def withdraw_operations(client: Client, operations: Several) -> int:
    """Take back what was asked, but let nodes finish what they are at.

    \b
    Examples:
      corral ops withdraw 3f2a91c0
    """
    return await _steer(client, operations, client.operations.withdraw, "withdrawn")


@app.command("dismiss")
@remote
async def dismiss_operations(client: Client, operations: Several) -> int:
    """Show an operation no more. What it asks for goes on.

    \b
    Examples:
      corral ops dismiss 3f2a91c0
    """
    return await _steer(client, operations, client.operations.dismiss, "dismissed")


@app.command("history")
@remote_destructive_with("clear")
async def show_history(
    client: Client,
    clear: Annotated[bool, typer.Option("--clear", help="forget it, for everybody")] = False,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """List operations that have ended, the newest first. In JSON, `operation_id` is the whole of what the column ID
    begins.

    \b
    Examples:
      corral ops history
      corral ops history --json | jq -r '.[] | select(.outcome == "failed") | .operation_id'
      corral ops history --clear --yes
    """
    if clear:
        if not yes:
            confirm("forget every operation that has ended")
        await client.operations.clear_history()
        remark("forgotten")
        return
    records = await client.operations.history()
    if as_json:
        print_json(records)
        return
    rows = [operation_text.history_row(record) for record in records]
    print_table(operation_text.HISTORY_COLUMNS, rows, empty="no operation has ended yet")


async def find(client: Client, given: str) -> OperationView:
    """By its id, or by how that begins where only one does so."""
    if not _ID.match(given):
        raise NotFound(f"{given!r} is no operation's id: `corral ops list --all` has them all")
    try:
        return await client.operations.get(given)
    except NotFound as error:
        everything = await client.operations.list(everything=True, rows=False)
        chosen = [view for view in everything if view.job_id.startswith(given)]
        if len(chosen) > 1:
            raise Conflict(f"{len(chosen)} operations begin with {given!r}: give more of the id") from error
        if not chosen:
            raise NotFound(f"no operation {given!r}: `corral ops list --all` has them all") from error
        return await client.operations.get(chosen[0].job_id)


async def _steer(client: Client, operations: Sequence[str], act: Callable[[str], Awaitable[Steered]], done: str) -> int:
    async def steer(given: str) -> str:
        view = await find(client, given)
        for each in (await act(view.job_id)).notes:
            remark(plain(each))
        return f"{operation_text.short_id(view.job_id)} ({view.kind} {view.backend}) {done}"

    return await each_in_turn(operations, steer)
