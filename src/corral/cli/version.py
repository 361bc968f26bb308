"""`corral version`: the version of this installation. `corral doctor` shows the version of the fleet."""

from __future__ import annotations

import platform

from corral import __version__
from corral.cli.common import declare
from corral.cli.common.options import Json
from corral.cli.common.output import print_json, print_line
from corral.contract.codec import PROTOCOL

app = declare.App()


@app.command("version")
def version(
    as_json: Json = False,
) -> None:
    """Print the version of Corral, of its protocol and of Python."""
    if as_json:
        print_json({"version": __version__, "protocol": PROTOCOL, "python": platform.python_version()})
    else:
        print_line(f"corral {__version__} (protocol {PROTOCOL}, Python {platform.python_version()})")
