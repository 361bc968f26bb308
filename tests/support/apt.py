"""An `apt-get` of the test's own, in front of the machine's: a shell script in a folder that notes its calls."""

from __future__ import annotations

import os
import shlex
from pathlib import Path


def scripted_apt(folder: Path, script: str) -> dict[str, str]:
    """The environment in which it is the one that is found. Its arguments stand in `calls`, a line each."""
    program = folder / "bin" / "apt-get"
    program.parent.mkdir(parents=True, exist_ok=True)
    program.write_text(f'#!/bin/sh\ncd {shlex.quote(str(folder))}\necho "$@" >>calls\n{script}\n')
    program.chmod(0o755)
    return {**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}"}
