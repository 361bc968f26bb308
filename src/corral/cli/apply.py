"""`corral apply`: bring about what a file says."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from corral.cli.asking import Json
from corral.cli.output import DONE, FAILED, complain, plain, print_json, remark, tell
from corral.cli.remote import remote_destructive
from corral.kit.errors import Invalid

if TYPE_CHECKING:
    from corral.client import Client
    from corral.contract.fleet import FleetChange, FleetDiff

app = typer.Typer(rich_markup_mode=None, add_completion=False)
_SIGNS = {"create": "+", "change": "~", "delete": "-", "skip": "?", "nothing": " "}
_DONE = {"create": "made", "change": "changed", "delete": "deleted", "skip": "skipped", "nothing": "as they were"}


@app.command("apply")
@remote_destructive
async def apply(
    client: Client,
    file: Annotated[str, typer.Option("--file", "-f", metavar="FILE", help="YAML; - reads stdin", show_default=False)],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="only tell what differs")] = False,
    prune: Annotated[bool, typer.Option("--prune", help="delete models and schedules the file does not name")] = False,
    as_json: Json = False,
) -> int:
    """Bring about what a file says of labels, backends, models and schedules. What it does not speak of stays.

    \b
    Examples:
      corral apply -f fleet.yaml --dry-run
      corral apply -f fleet.yaml
      corral export > fleet.yaml     (what to begin with)
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
                tell(plain(line))
        if change.failed:
            complain(f"{change.kind} {change.name}: {change.reason}")
    counts = Counter(change.action for change in diff.changes if not change.failed)
    told = ", ".join(f"{counts[action]} {words}" for action, words in _DONE.items() if counts[action])
    remark(f"{told or 'nothing to do'}." + (" Nothing was done." if diff.dry_run else ""))
    if any(change.operation for change in diff.changes):
        remark("`corral ops list` shows how far the backends are.")


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
        raise Invalid(f"{file} is not text") from error
