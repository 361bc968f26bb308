"""`corral version`: what is installed here. The fleet's own is in `corral doctor`."""

from __future__ import annotations

import platform
from typing import Annotated

import typer

from corral import __version__
from corral.cli.output import print_json, tell
from corral.contract.protocol import PROTOCOL

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def version(
    as_json: Annotated[bool, typer.Option("--json", help="as JSON")] = False,
) -> None:
    """Say which version this is."""
    if as_json:
        print_json({"version": __version__, "protocol": PROTOCOL, "python": platform.python_version()})
    else:
        tell(f"corral {__version__} (protocol {PROTOCOL}, Python {platform.python_version()})")
