"""`corral why …`: explains decisions of the scheduler and the state of operations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from corral.cli.common import declare
from corral.cli.common.fleet_command import fleet_command
from corral.cli.common.options import Json
from corral.cli.common.output import print_json, print_line, print_table, printable
from corral.cli.fleet import why_text
from corral.cli.operations import text as operation_text
from corral.cli.operations.commands import find
from corral.kit.errors import NotFound

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from corral.client import Client
    from corral.contract.why import WhyReplica, WhyVerdict

app = declare.App(
    help="""Explain placement decisions, operations and rollouts.

    \b
    Examples:
      corral why model smollm2-135m
      corral why node barn
      corral why op 3f2a91c0
      corral why rollout 3f2a91c0
    """,
)
Numbers = Annotated[bool, declare.Option("--numbers", help="show every check and the ranking")]


@app.command("model")
@fleet_command
async def why_model(
    client: Client,
    model: Annotated[str, declare.Argument(metavar="MODEL", help="name of the model")],
    numbers: Numbers = False,
    as_json: Json = False,
) -> None:
    """Show where the next replica would be placed, and why.

    \b
    Examples:
      corral why model smollm2-135m
      corral why model smollm2-135m --numbers
    """
    why = await client.why.model(model)
    if as_json:
        print_json(why)
        return
    _print_lines(why_text.model_details(why))
    _print_replicas(why.replicas)
    print_line()
    print_table(why_text.NODE_COLUMNS, why_text.verdict_rows(why), empty="There are no nodes.")
    if numbers:
        _print_numbers((verdict.node, verdict) for verdict in why.nodes)


@app.command("node")
@fleet_command
async def why_node(
    client: Client,
    node: Annotated[str, declare.Argument(metavar="NODE", help="name or id of the node")],
    numbers: Numbers = False,
    as_json: Json = False,
) -> None:
    """Show the free memory of a node and what fits there.

    The list has its replicas, and the models for which the node is eligible.

    \b
    Examples:
      corral why node barn
      corral why node barn --json
    """
    why = await client.why.node(node)
    if as_json:
        print_json(why)
        return
    _print_lines(why_text.node_details(why))
    print_line()
    print_table(why_text.SPACE_COLUMNS, [why_text.space_row(each) for each in why.spaces], empty="")
    _print_replicas(why.replicas)
    print_line()
    print_table(why_text.MODEL_COLUMNS, why_text.model_rows(why), empty="There are no models.")
    if numbers:
        _print_numbers((verdict.model, verdict) for verdict in why.models)


Operation = Annotated[str, declare.Argument(metavar="OPERATION", help="id of the operation, or the beginning of it")]


@app.command("op")
@fleet_command
async def why_op(client: Client, operation: Operation, as_json: Json = False) -> None:
    """Short for `corral why operation`.

    With --json it prints only the nodes that are not done.

    \b
    Examples:
      corral why op 3f2a91c0
    """
    await _explain_operation(client, operation, as_json=as_json, whole=False)


@app.command("operation")
@fleet_command
async def why_operation(client: Client, operation: Operation, as_json: Json = False) -> None:
    """Show where an operation is not done, and why.

    Of an upgrade it also prints the figures of its soaks.

    \b
    Examples:
      corral why operation 3f2a91c0
    """
    await _explain_operation(client, operation, as_json=as_json, whole=True)


@app.command("rollout")
@fleet_command
async def why_rollout(client: Client, operation: Operation, as_json: Json = False) -> None:
    """Show how far a rollout is, and the figures that decide.

    \b
    Examples:
      corral why rollout 3f2a91c0
      corral why rollout 3f2a91c0 --json
    """
    why = await client.why.rollout((await find(client, operation)).job_id)
    if as_json:
        print_json(why)
        return
    _print_lines(map(printable, why.lines))


async def _explain_operation(client: Client, operation: str, *, as_json: bool, whole: bool) -> None:
    view = await find(client, operation)
    try:
        why = await client.why.operation(view.job_id)
    except NotFound:  # a controller of an earlier release does not explain operations
        from corral.contract.why import WhyOperation

        why = WhyOperation(view)
    view = why.operation
    waiting = [each for each in view.nodes if each.status != "success"]
    if as_json:
        print_json(why if whole else waiting)
        return
    _print_lines(operation_text.details(view))
    if why.rollout is not None:
        print_line()
        _print_lines(map(printable, why.lines))
    print_line()
    rows = [operation_text.node_row(each) for each in waiting]
    print_table(operation_text.NODE_COLUMNS, rows, empty="The operation is done on every node.")


def _print_lines(lines: Iterable[str]) -> None:
    for line in lines:
        print_line(line)


def _print_replicas(replicas: Sequence[WhyReplica]) -> None:
    if replicas:
        print_line()
        print_table(why_text.REPLICA_COLUMNS, [why_text.replica_row(each) for each in replicas], empty="")


def _print_numbers(verdicts: Iterable[tuple[str, WhyVerdict]]) -> None:
    """Print the checks of each model or node under its name."""
    for name, verdict in verdicts:
        print_line()
        _print_lines(why_text.numbers(verdict, by=name))
