"""`corral fleet versions`: which version of Corral each controller and each node runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from corral.cli.common import declare
from corral.cli.common.fleet_command import fleet_command
from corral.cli.common.options import Json
from corral.cli.common.output import DONE, print_json, print_note, print_table
from corral.cli.fleet import releases
from corral.cli.fleet.install import install_corral
from corral.cli.fleet.upgrade import upgrade_fleet

if TYPE_CHECKING:
    from corral.client import Client
    from corral.contract.admin import ControllerView, NodeView

app = declare.App(
    help="""Show and upgrade the version of Corral on each machine.

    \b
    Examples:
      corral fleet versions
      corral fleet upgrade --wheel corral-1.2.0-py3-none-any.whl
      corral fleet releases
    """,
    is_group=True,
)
app.command("upgrade")(upgrade_fleet)
app.command("install")(install_corral)
for _name, _command in releases.COMMANDS.items():
    app.command(_name)(_command)
COLUMNS = ("ROLE", "NAME", "VERSION", "STATUS")
_NOT_REPORTED = "unknown"  # of a LocalAI worker


@app.command("versions")
@fleet_command
async def show_versions(client: Client, as_json: Json = False) -> int:
    """Show which version of Corral each machine runs.

    \b
    Examples:
      corral fleet versions
      corral fleet versions --json | jq -r '.[] | select(.version != "1.2.0") | .name'
    """
    cluster = await client.cluster()
    found = list_versions(cluster.controllers, await client.nodes.list())
    if as_json:
        print_json(found)
    else:
        print_table(COLUMNS, [tuple(each.values()) for each in found], empty="No controllers and no nodes.")
        print_note(summarize(found))
    return DONE


def list_versions(controllers: Iterable[ControllerView], nodes: Iterable[NodeView]) -> list[dict[str, str]]:
    """One entry per process that reports its version: controllers, then nodes."""
    found = [
        {
            "role": "controller",
            "name": each.host,
            "version": each.version,
            "status": "live" if each.live else "gone",
        }
        for each in controllers
    ]
    return found + [
        {"role": "node", "name": each.name, "version": each.version or _NOT_REPORTED, "status": each.status}
        for each in nodes
    ]


def summarize(found: Sequence[dict[str, str]]) -> str:
    counts = Counter(each["version"] for each in found if each["status"] != "gone")
    if len(counts) <= 1:
        return "All run one version."
    return ", ".join(f"{count} × {version}" for version, count in counts.most_common())
