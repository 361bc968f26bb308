"""`corral ops …`: lists, follows, cancels and retries the operations of the fleet."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Annotated

from corral.cli.common import declare
from corral.cli.common.fleet_command import destructive_command, destructive_if_given, fleet_command
from corral.cli.common.options import Detach, Json, Yes, confirm, reject_empty, run_for_each
from corral.cli.common.output import DONE, print_json, print_line, print_note, print_table, printable
from corral.cli.operations import text as operation_text
from corral.cli.operations import watch
from corral.kit.errors import Conflict, NotFound

if TYPE_CHECKING:
    from corral.client import Client
    from corral.contract.admin import OperationView, Steered

app = declare.App(
    help="""List, follow, cancel and retry operations.

    An operation is an install, upgrade, rollback, delete or fetch that runs on one or many nodes. It continues without
    the command that started it, except for an upload: run that command again to continue it.

    \b
    Examples:
      corral ops list
      corral ops watch 3f2a91c0
      corral ops cancel 3f2a91c0
    """,
)
Operation = Annotated[str, declare.Argument(metavar="OPERATION", help="id of the operation, or the beginning of it")]
Several = Annotated[
    list[str], declare.Argument(metavar="OPERATION", help="ids of operations, or the beginnings of them")
]
_ID = re.compile(r"[0-9A-Za-z-]+\Z")  # anything else would change the path of the API request
OneNode = Annotated[
    str, declare.Option("--node", metavar="NODE", help="only on this node, by name or id", callback=reject_empty)
]


@app.command("list")
@fleet_command
async def list_operations(
    client: Client,
    everything: Annotated[
        bool, declare.Option("--all", help="include operations that have ended, without their nodes")
    ] = False,
    as_json: Json = False,
) -> None:
    """List operations that are running, waiting or failing. In JSON, `operation_id` is the full id.

    \b
    Examples:
      corral ops list
      corral ops list --all --json | jq -r '.[].operation_id'
    """
    # Operations that have ended come with counts only: a large fleet has a row for each node of each operation.
    views = await client.operations.list(everything=everything, rows=not everything)
    if as_json:
        print_json(views)
        return
    rows = [operation_text.row(view) for view in views]
    print_table(operation_text.COLUMNS, rows, empty="No operations yet." if everything else operation_text.NO_OPERATION)


@app.command("show")
@fleet_command
async def show_operation(client: Client, operation: Operation, as_json: Json = False) -> None:
    """Show one operation and its nodes.

    \b
    Examples:
      corral ops show 3f2a91c0
    """
    view = await find(client, operation)
    if as_json:
        print_json(view)
        return
    for line in operation_text.details(view):
        print_line(line)
    print_line()
    rows = [operation_text.node_row(each) for each in view.nodes]
    print_table(operation_text.NODE_COLUMNS, rows, empty="The operation has no nodes.")


@app.command("watch")
@fleet_command
async def watch_operations(
    client: Client,
    operations: Annotated[
        list[str] | None,
        declare.Argument(
            metavar="OPERATION",
            help="ids, or the beginnings of them; without ids, every running operation",
        ),
    ] = None,
    until_ended: Annotated[
        bool,
        declare.Option("--to-the-end", help="also wait for nodes that are offline or failing, until each has ended"),
    ] = False,
    as_json: Annotated[bool, declare.Option("--json", help="print every change as a line of JSON")] = False,
) -> int:
    """Follow operations until no node makes progress. Ctrl-C detaches; the operations continue.

    Exit code 0: done on every node. 1: a node fails. 3: a node is not done yet, for example because it is offline.

    \b
    Examples:
      corral ops watch 3f2a91c0
      corral ops watch 3f2a91c0 --to-the-end
      corral ops watch --json | jq -r '.message'
    """
    views = [await find(client, each) for each in operations or []]
    views = views or [view for view in await client.operations.list(rows=False) if view.kind != operation_text.STAGING]
    if not views:
        print_note("No operation is running.")
        return DONE
    ids = [view.job_id for view in views]
    if as_json:
        return await watch.follow_as_json_lines(client, ids, until_ended=until_ended)
    return await watch.follow(client, ids, until_ended=until_ended)


@app.command("cancel")
@destructive_command
async def cancel_operations(client: Client, operations: Several, node: OneNode = "") -> int:
    """Cancel operations and stop their downloads. The state requested before them applies again.

    This includes nodes that were already done: after a cancelled upgrade they return to the previous version, after a
    cancelled delete they install the backend again. A backend without an earlier request stays as it is now.

    \b
    Examples:
      corral ops cancel 3f2a91c0
      corral ops cancel 3f2a91c0 --node attic
    """
    where = f" on {node}" if node else ""
    return await _act_on(
        client, operations, lambda each: client.operations.cancel(each, node=node), f"cancelled{where}"
    )


@app.command("retry")
@fleet_command
async def retry_operations(
    client: Client,
    operations: Several,
    node: OneNode = "",
    detach: Detach = False,
    as_json: Json = False,
) -> int:
    """Retry failing nodes now. A cancelled operation is started again.

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
    return await watch.follow_or_detach(client, ids, detach=detach, as_json=as_json)


@app.command("withdraw")
@destructive_command
async def withdraw_operations(client: Client, operations: Several) -> int:
    """Take operations back, but let nodes finish what they are doing. No other node starts.

    \b
    Examples:
      corral ops withdraw 3f2a91c0
    """
    return await _act_on(client, operations, client.operations.withdraw, "withdrawn")


@app.command("dismiss")
@fleet_command
async def dismiss_operations(client: Client, operations: Several) -> int:
    """Hide operations from the list. The operations themselves continue.

    \b
    Examples:
      corral ops dismiss 3f2a91c0
    """
    return await _act_on(client, operations, client.operations.dismiss, "dismissed")


@app.command("history")
@destructive_if_given("clear")
async def show_history(
    client: Client,
    clear: Annotated[bool, declare.Option("--clear", help="delete the history, for all users")] = False,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """List operations that have ended, newest first. In JSON, `operation_id` is the full id.

    \b
    Examples:
      corral ops history
      corral ops history --json | jq -r '.[] | select(.outcome == "failed") | .operation_id'
      corral ops history --clear --yes
    """
    if clear:
        if not yes:
            confirm("delete the history of all operations that have ended")
        await client.operations.clear_history()
        print_note("The history is deleted.")
        return
    records = await client.operations.history()
    if as_json:
        print_json(records)
        return
    rows = [operation_text.history_row(record) for record in records]
    print_table(operation_text.HISTORY_COLUMNS, rows, empty="No operation has ended yet.")


async def find(client: Client, given: str) -> OperationView:
    """Find an operation by its id, or by the beginning of the id if only one matches."""
    if not _ID.match(given):
        raise NotFound(f"{given!r} is not an operation id: `corral ops list --all` lists them")
    try:
        return await client.operations.get(given)
    except NotFound as error:
        everything = await client.operations.list(everything=True, rows=False)
        chosen = [view for view in everything if view.job_id.startswith(given)]
        if len(chosen) > 1:
            raise Conflict(f"{len(chosen)} operation ids begin with {given!r}: give more characters") from error
        if not chosen:
            raise NotFound(f"no operation {given!r}: `corral ops list --all` lists them") from error
        return await client.operations.get(chosen[0].job_id)


async def _act_on(
    client: Client, operations: Sequence[str], act: Callable[[str], Awaitable[Steered]], done: str
) -> int:
    async def act_on_one(given: str) -> str:
        view = await find(client, given)
        for each in (await act(view.job_id)).notes:
            print_note(printable(each))
        return f"{operation_text.short_id(view.job_id)} ({view.kind} {view.backend}) {done}"

    return await run_for_each(operations, act_on_one)
