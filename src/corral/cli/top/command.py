"""`corral top`: the fleet in the terminal, live; or once, for scripts."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

from corral.cli.common import declare
from corral.cli.common.fleet_command import fleet_command
from corral.cli.common.output import is_interactive, print_json, print_line, print_table

if TYPE_CHECKING:
    from corral.cli.top.state import FleetState
    from corral.client import Client

app = declare.App()
_UNUSABLE = ("", "dumb", "unknown")  # terminals that cannot move the cursor
_ONCE = ("nodes", "models", "operations", "requests")
_MAX_LINES = 20  # of a table


@app.command("top")
@fleet_command
async def top(
    client: Client,
    once: Annotated[bool, declare.Option("--once", help="print the present state once, as text")] = False,
    as_json: Annotated[
        bool, declare.Option("--json", help="print the present state once, as JSON and nothing else on stdout")
    ] = False,
) -> None:
    """Show nodes, models, operations, requests and logs live in the terminal.

    Keys are shown at the bottom; ? explains them. Keys of viewers show everything and change nothing. Without a
    terminal the state is printed once.

    \b
    Examples:
      corral top
      corral top --once
      corral top --json | jq '.nodes[] | select(.status != "healthy") | .name'
    """
    from corral.cli.top.feed import read_fleet

    fleet = await read_fleet(client)
    if as_json:
        print_json(_as_data(fleet))
    elif once or not is_interactive() or os.environ.get("TERM", "") in _UNUSABLE:
        _print_once(fleet)
    else:
        from corral.cli.top.app import TopApp

        await TopApp(client, fleet).run_async(mouse=False)  # the mouse keeps selecting text


def _as_data(fleet: FleetState) -> dict[str, object]:
    from corral.cli.top.tables import node_rows, operation_rows

    return {
        "url": fleet.url,
        "context": fleet.context,
        "key": fleet.key_name,
        "role": fleet.role,
        "attention": list(fleet.attention),
        "nodes": [row.item for row in node_rows(fleet)],
        "models": fleet.models,
        "replicas": fleet.replicas,
        "operations": [row.item for row in operation_rows(fleet)],
        "running": fleet.running,
        "requests": fleet.requests,
    }


def _print_once(fleet: FleetState) -> None:
    from corral.cli.top.overview import overview_lines
    from corral.cli.top.tables import TABLES

    now = datetime.now(UTC)
    for line in overview_lines(fleet, now, _MAX_LINES, with_requests=False):
        print_line(line)
    for name in _ONCE:
        table = TABLES[name]
        rows = table.rows(fleet)
        if rows:
            print_line()
            print_table(table.columns, [table.cells(row.item, now) for row in rows[:_MAX_LINES]], empty="")
            if len(rows) > _MAX_LINES:
                print_line(f"and {len(rows) - _MAX_LINES} more")
