"""`corral version`: the version of this installation. `corral doctor` shows the version of the fleet."""

from __future__ import annotations

import platform

import typer

from corral import __version__
from corral.cli.common.options import Json
from corral.cli.common.output import print_json, print_line
from corral.contract.codec import PROTOCOL

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def version(
    as_json: Json = False,
) -> None:
    """Print the version of Corral, of its protocol and of Python."""
    if as_json:
        print_json({"version": __version__, "protocol": PROTOCOL, "python": platform.python_version()})
    else:
        print_line(f"corral {__version__} (protocol {PROTOCOL}, Python {platform.python_version()})")
