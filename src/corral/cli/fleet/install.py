"""`corral fleet install`: Corral on this machine in a folder of versions, where it can be replaced while it runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from corral.cli.common import declare
from corral.cli.common.output import print_line, print_note
from corral.cli.common.roles import install_version
from corral.cli.models.upload import find_parts, local_path
from corral.kit.process import HOME_DATA, resolve_data


def install_corral(
    wheel: Annotated[str, declare.Argument(metavar="WHEEL", help="the wheel of a version of Corral")],
    packages: Annotated[
        str,
        declare.Option(
            "--packages",
            metavar="FOLDER",
            help="the wheels of its dependencies; without it they come from the package index",
        ),
    ] = "",
    data: Annotated[
        str, declare.Option("--data", metavar="PATH", help="data folder of the fleet; the versions lie in it")
    ] = "",
) -> None:
    """Install a version that can be replaced while it runs.

    `corral fleet upgrade` replaces it with the others. Machines that joined with the pasted line have it like this
    already. On the first machine, start `corral up` with the command that is printed: from then on its worker is
    upgraded with the others, and gateway and controller follow.

    \b
    Examples:
      corral fleet install corral-1.1.0-py3-none-any.whl
      corral fleet install corral-1.1.0-py3-none-any.whl --packages wheels --data /srv/corral
    """
    (path,) = find_parts(local_path(wheel))
    chosen = data or os.environ.get("CORRAL_DATA", "")
    root = resolve_data(Path(chosen).absolute() if chosen else HOME_DATA) / "corral"
    print_note(f"Building in {root}; this takes a minute.")
    command, version = install_version(root, path.absolute(), Path(packages).absolute() if packages else None)
    print_line(f"Corral {version} is installed. Start it with: {command} up")
