"""`corral export`: the fleet as a file."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from corral.cli.asking import Json
from corral.cli.output import as_plain_data, print_json, tell
from corral.cli.remote import remote
from corral.kit.yaml_text import as_yaml

if TYPE_CHECKING:
    from corral.client import Client

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command("export")
@remote
async def export(client: Client, as_json: Json = False) -> None:
    """Print the file that would bring this fleet about: its models, backends, schedules, and the labels people set.

    \b
    Examples:
      corral export > fleet.yaml
    """
    written = await client.fleet.export()
    if as_json:
        print_json(written)
        return
    for line in as_yaml({key: value for key, value in as_plain_data(written).items() if value}).splitlines():
        tell(line)
