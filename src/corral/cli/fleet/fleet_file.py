"""`corral apply` and `corral export`: the desired state of the fleet as a YAML file."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from corral.cli.common import declare
from corral.cli.common.fleet_command import destructive_command, fleet_command
from corral.cli.common.options import DryRun, Json
from corral.cli.common.output import (
    DONE,
    FAILED,
    as_plain_data,
    print_error,
    print_json,
    print_line,
    print_note,
    printable,
)
from corral.kit.errors import Invalid
from corral.kit.humanize import to_yaml

if TYPE_CHECKING:
    from corral.client import Client
    from corral.contract.fleet import FleetChange, FleetDiff

apply_app = declare.App()
export_app = declare.App()
_SIGNS = {"create": "+", "change": "~", "delete": "-", "skip": "?", "nothing": " "}
_DONE = {"create": "created", "change": "changed", "delete": "deleted", "skip": "skipped", "nothing": "unchanged"}


@apply_app.command("apply")
@destructive_command
async def apply(
    client: Client,
    file: Annotated[str, declare.Option("--file", "-f", metavar="FILE", help="YAML file; - reads stdin")],
    dry_run: DryRun = False,
    prune: Annotated[
        bool, declare.Option("--prune", help="delete models and schedules that the file does not contain")
    ] = False,
    as_json: Json = False,
) -> int:
    """Apply a file with labels, backends, models and schedules. Everything that the file does not contain stays.

    \b
    Examples:
      corral apply -f fleet.yaml --dry-run
      corral apply -f fleet.yaml
      corral export > fleet.yaml     (a file to start from)
    """
    from corral.contract.fleet import ApplyBody

    diff = await client.fleet.apply(ApplyBody(text=_read(file), dry_run=dry_run, prune=prune))
    if as_json:
        print_json(diff)
    else:
        _show(diff)
    return FAILED if any(change.failed for change in diff.changes) else DONE


def _show(diff: FleetDiff) -> None:
    for change in diff.changes:
        if change.action != "nothing":
            for line in lines_of(change):
                print_line(printable(line))
        if change.failed:
            print_error(f"{change.kind} {change.name}: {change.reason}")
    counts = Counter(change.action for change in diff.changes if not change.failed)
    summary = ", ".join(f"{counts[action]} {words}" for action, words in _DONE.items() if counts[action])
    print_note(f"{summary or 'No differences'}." + (" Dry run: nothing was changed." if diff.dry_run else ""))
    if any(change.operation for change in diff.changes):
        print_note("Follow the backend operations: `corral ops list`")


def lines_of(change: FleetChange) -> list[str]:
    reason = f": {change.reason}" if change.reason and not change.failed else ""
    return [
        f"{_SIGNS.get(change.action, ' ')} {change.kind} {change.name}{reason}",
        *(f"    {each}" for each in change.details),
    ]


def _read(file: str) -> str:
    try:
        return sys.stdin.read() if file == "-" else Path(file).expanduser().read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise Invalid(f"{file} is not a UTF-8 text file") from error


@export_app.command("export")
@fleet_command
async def export(client: Client, as_json: Json = False) -> None:
    """Print the fleet as a YAML file for `corral apply`.

    The file contains the models, backends and schedules, and the labels that users have set.

    \b
    Examples:
      corral export > fleet.yaml
    """
    exported = await client.fleet.export()
    if as_json:
        print_json(exported)
        return
    for line in to_yaml({key: value for key, value in as_plain_data(exported).items() if value}).splitlines():
        print_line(line)
