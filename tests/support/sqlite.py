"""SQLite databases that have the schema already: copies of one that is made once per process.

A fresh file costs forty milliseconds of migrations, a copy one. Tests of the migrations themselves make their own.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from corral.store import open_store

_START_S = 30.0


@functools.cache
def sqlite_template() -> Path:
    """A database with the schema and nothing in it: copy it."""
    folder = Path(tempfile.mkdtemp(prefix="corral-template-"))
    atexit.register(shutil.rmtree, folder)
    path = folder / "corral.db"

    async def give_schema() -> None:
        async with open_store(f"sqlite:///{path}"):
            pass

    with ThreadPoolExecutor(1) as thread:  # this one may have an event loop of pytest's
        thread.submit(asyncio.run, give_schema()).result(timeout=_START_S)
    return path


def sqlite_url(folder: Path, name: str = "corral.db") -> str:
    """Of the database in the folder, which is made unless it is there."""
    path = folder / name
    if not path.exists():
        shutil.copy(sqlite_template(), path)
    return f"sqlite:///{path}"
