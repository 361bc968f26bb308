"""Starts `other_process.py`, and another process that locks a SQLite file."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_LOCK = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("BEGIN EXCLUSIVE")
print("locked", flush=True)
sys.stdin.read()
"""


def start(deed: str, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(Path(__file__).with_name("other_process.py")), deed, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> str:
    said, _ = process.communicate(timeout=40)
    assert process.returncode == 0
    return said.strip()


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate(timeout=60)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Somebody else holds the write lock of this file."""
    holder = subprocess.Popen(
        [sys.executable, "-c", _LOCK, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "locked\n"
        yield
    finally:
        holder.communicate(timeout=60)  # closes its stdin: it ends and lets go
