"""A file that a command writes for its user: whole or not at all, and only its owner may read it."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from corral.cli.common import declare
from corral.kit.errors import Conflict, Failed, Invalid

Overwrite = Annotated[bool, declare.Option("--overwrite", help="replace FILE if it exists")]


def check_target(file: str, *, overwrite: bool) -> Path:
    """The absolute path. Raises if a file cannot be written there."""
    target = Path(file).expanduser().absolute()
    if target.is_dir():
        raise Invalid(f"{target} is a folder: give the name of a file")
    if not target.parent.is_dir():
        raise Invalid(f"there is no folder {target.parent}: create it first")
    if target.exists() and not overwrite:
        raise Conflict(f"{target} exists: give another name, or --overwrite")
    return target


@contextlib.contextmanager
def explain_os_errors(path: Path) -> Iterator[None]:
    """Turn an error of the file system into one line that says what to do."""
    try:
        yield
    except OSError as error:
        fix = "choose another place"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            fix = "free some space, or choose another place"
        elif error.errno in (errno.EACCES, errno.EPERM):
            fix = "run this command as the user that runs the fleet"
        raise Failed(f"{error.filename or path}: {error.strerror or error}: {fix}") from error
