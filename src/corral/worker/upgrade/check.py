"""The self-check of a version before it takes over: `python -m corral.worker.upgrade.check DATA`. It loads all code of
the worker and reads what an earlier version wrote, and changes nothing.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from corral import __version__
from corral.kit.errors import CorralError


def check(data: Path) -> None:
    """Raises what is wrong."""
    importlib.import_module("corral.worker.main")  # that it can be loaded is the first check
    from corral.worker.agent.join.identity import read_identity
    from corral.worker.settings import saved

    if read_identity(data) is None:
        raise CorralError(f"{data} has no identity of a node that this version can read")
    saved.read(data)


if __name__ == "__main__":
    try:
        check(Path(sys.argv[1]))
    except CorralError as error:
        print(error.message, file=sys.stderr)
        sys.exit(1)
    print(__version__)
