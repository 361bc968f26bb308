"""Where uv is: on the machine, or where `scripts/_setup dev` put one for the tests that are about it."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path


def path_with_uv() -> str:
    """For the environment of what is to find it."""
    return os.pathsep.join([os.environ["PATH"], str(Path(sys.prefix) / "with-uv" / "bin")])


def find_uv() -> str:
    uv = shutil.which("uv", path=path_with_uv())
    assert uv is not None, "there is no uv: run scripts/_setup dev"
    return uv
