"""`corral models files|stage|gc`: commands for the files of models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

from corral.cli.common import declare
from corral.cli.common.fleet_command import destructive_command, fleet_command
from corral.cli.common.options import Detach, Json, reject_empty
from corral.cli.common.output import (
    DONE,
    FAILED,
    print_error,
    print_json,
    print_line,
    print_note,
    print_table,
    printable,
)
from corral.cli.operations import watch
from corral.kit.humanize import format_bytes

if TYPE_CHECKING:
    from corral.client import Client
    from corral.contract.catalogue import CollectedView, ModelFileView, NodeFilesView

Model = Annotated[str, declare.Argument(metavar="MODEL", help="name of the model")]
FILE_COLUMNS = ("FILE", "SIZE", "SHA256", "CONTROLLER", "SOURCE")
NODE_COLUMNS = ("NODE", "STATE", "FILES", "BYTES", "DISK FREE", "NOTE")
GC_COLUMNS = ("WHERE", "REMOVED", "FILES", "BYTES", "WHY")
_SHORT_DIGEST = 12


@fleet_command
async def list_files(
    client: Client,
    name: Model,
    full: Annotated[bool, declare.Option("--full", help="print whole digests")] = False,
    as_json: Json = False,
) -> None:
    """List the files of a model and the nodes that have them.

    Each file with its size and digest; each node with how much of the files it has, whole or in part.

    \b
    Examples:
      corral models files smollm2-135m
      corral models files smollm2-135m --full
    """
    view = await client.models.files(name)
    if as_json:
        print_json(view)
        return
    print_table(FILE_COLUMNS, [file_row(file, full=full) for file in view.files], empty="No files are known yet.")
    print_line()
    print_table(NODE_COLUMNS, [node_row(node, len(view.files)) for node in view.nodes], empty="No nodes.")
    if view.note:
        print_note(printable(view.note))


@fleet_command
async def stage_model(
    client: Client,
    name: Model,
    node: Annotated[
        str, declare.Option("--node", metavar="NODE", help="only to this node, by name or id", callback=reject_empty)
    ] = "",
    selector: Annotated[
        str,
        declare.Option(
            "--selector", "-l", metavar="LABELS", help="only to nodes with these labels: a=b,c=d", callback=reject_empty
        ),
    ] = "",
    every_node: Annotated[bool, declare.Option("--all", help="to every node (the default)")] = False,
    detach: Detach = False,
    as_json: Json = False,
) -> int:
    """Bring the files of a model to nodes before a load needs them.

    Files that a node has are not sent again. Ctrl-C detaches; the fleet continues. Exit code 0: done. 1: failed.
    3: not finished yet.

    \b
    Examples:
      corral models stage smollm2-135m
      corral models stage smollm2-135m --node attic
      corral models stage smollm2-135m --selector tier=fast --detach
    """
    from corral.contract.catalogue import StageBody

    if sum((bool(node), bool(selector), every_node)) > 1:
        raise declare.BadParameter("give only one of --node, --selector and --all")
    accepted = await client.models.stage(name, StageBody(node=node, selector=selector))
    return await watch.follow_or_detach(client, [accepted.job_id], detach=detach, as_json=as_json)


@destructive_command
async def collect_files(
    client: Client,
    dry_run: Annotated[bool, declare.Option("--dry-run", help="remove nothing; print what would be removed")] = False,
    as_json: Json = False,
) -> int:
    """Remove files that no model needs, on controller and nodes.

    Files of present models, files that a process reads, files of running transfers and what a node used within the last
    half minute stay.

    \b
    Examples:
      corral models gc --dry-run
      corral models gc
    """
    view = await client.models.collect(dry_run=dry_run)
    failed = [place for place in view.places if place.error]
    if as_json:
        print_json(view)
        return FAILED if failed else DONE
    rows = list(collected_rows(view))
    if rows:
        print_table(GC_COLUMNS, rows, empty="")
    verb = "would be freed" if view.dry_run else "freed"
    print_line(f"{format_bytes(view.freed_bytes)} {verb}" if rows else "Nothing to remove.")
    for place in failed:
        print_error(printable(f"{place.node_name}: {place.error}"))
    if view.dry_run and rows:
        print_note("Remove these files: `corral models gc`")
    return FAILED if failed else DONE


def file_row(file: ModelFileView, *, full: bool = False) -> tuple[str, ...]:
    from corral.contract.installs import shown_uri

    digest = file.digest.removeprefix("sha256:")
    return (
        file.path,
        format_bytes(file.size_bytes) if file.size_bytes else "",
        digest if full else digest[:_SHORT_DIGEST],
        part_of(file.controller_bytes, file.size_bytes),
        shown_uri(file.source),
    )


def node_row(node: NodeFilesView, count: int) -> tuple[str, ...]:
    known = node.state != "unknown"
    whole = sum(1 for size in node.files if size)
    return (
        node.node_name,
        node.state,
        f"{whole} of {count}" if known and count else "",
        f"{format_bytes(node.have_bytes)} / {format_bytes(node.total_bytes)}" if known and node.total_bytes else "",
        format_bytes(node.free_bytes) if node.free_bytes else "",
        node.reason,
    )


def part_of(have_bytes: int, size_bytes: int) -> str:
    if not have_bytes:
        return "no"
    return "yes" if have_bytes >= size_bytes else f"{100 * have_bytes // size_bytes}%"


def collected_rows(view: CollectedView) -> Iterator[Sequence[str]]:
    for place in view.places:
        for removed in place.removed:
            where = "the controller" if place.node_id == "controller" else place.node_name
            yield where, removed.name, str(removed.files), format_bytes(removed.size_bytes), removed.why


COMMANDS = {"files": list_files, "stage": stage_model, "gc": collect_files}
