"""`corral why …`: what was looked at, what was found, what is being waited for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from corral.cli import operation_text, why_text
from corral.cli.asking import Json
from corral.cli.ops import find
from corral.cli.output import print_json, print_table, tell
from corral.cli.remote import remote

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from corral.client import Client
    from corral.contract.why import WhyReplica, WhyVerdict

app = typer.Typer(
    rich_markup_mode=None,
    add_completion=False,
    no_args_is_help=True,
    help="Why: what was looked at and decided, with the numbers.",
)
Numbers = Annotated[bool, typer.Option("--numbers", help="every check and the whole ranking")]


@app.command("model")
@remote
async def why_model(
    client: Client,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="its name", show_default=False)],
    numbers: Numbers = False,
    as_json: Json = False,
) -> None:
    """Show where a model's next replica would go, and why not elsewhere.

    \b
    Examples:
      corral why model smollm2-135m
      corral why model smollm2-135m --numbers
    """
    told = await client.why.model(model)
    if as_json:
        print_json(told)
        return
    _tell_lines(why_text.model_details(told))
    _tell_replicas(told.replicas)
    tell()
    print_table(why_text.NODE_COLUMNS, why_text.verdict_rows(told), empty="there are no nodes")
    if numbers:
        _tell_numbers((verdict.node, verdict) for verdict in told.nodes)


@app.command("node")
@remote
async def why_node(
    client: Client,
    node: Annotated[str, typer.Argument(metavar="NODE", help="its name or id", show_default=False)],
    numbers: Numbers = False,
    as_json: Json = False,
) -> None:
    """Show what a node has left, what runs there, and which models it would take.

    \b
    Examples:
      corral why node barn
      corral why node barn --json
    """
    told = await client.why.node(node)
    if as_json:
        print_json(told)
        return
    _tell_lines(why_text.node_details(told))
    tell()
    print_table(why_text.SPACE_COLUMNS, [why_text.space_row(each) for each in told.spaces], empty="")
    _tell_replicas(told.replicas)
    tell()
    print_table(why_text.MODEL_COLUMNS, why_text.model_rows(told), empty="no model yet")
    if numbers:
        _tell_numbers((verdict.model, verdict) for verdict in told.models)


@app.command("op")
@remote
async def why_operation(
    client: Client,
    operation: Annotated[
        str, typer.Argument(metavar="ID", help="of the operation, or how it begins", show_default=False)
    ],
    as_json: Json = False,
) -> None:
    """Show what an operation still waits for, and why, node by node.

    \b
    Examples:
      corral why op 3f2a91c0
    """
    view = await find(client, operation)
    waiting = [each for each in view.nodes if each.status != "success"]
    if as_json:
        print_json(waiting)
        return
    _tell_lines(operation_text.details(view))
    tell()
    rows = [operation_text.node_row(each) for each in waiting]
    print_table(operation_text.NODE_COLUMNS, rows, empty="nothing is left to do")


def _tell_lines(lines: Iterable[str]) -> None:
    for line in lines:
        tell(line)


def _tell_replicas(replicas: Sequence[WhyReplica]) -> None:
    if replicas:
        tell()
        print_table(why_text.REPLICA_COLUMNS, [why_text.replica_row(each) for each in replicas], empty="")


def _tell_numbers(verdicts: Iterable[tuple[str, WhyVerdict]]) -> None:
    """Each under the name of what was judged, or by whom."""
    for name, verdict in verdicts:
        tell()
        _tell_lines(why_text.numbers(verdict, by=name))
