"""`corral migrate-store`: copies the database of a stopped fleet to PostgreSQL. `corral.store` does the copying."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

from corral.cli.common import declare
from corral.cli.common.data_folder import DataFolder, default_data, lock_file
from corral.cli.common.options import Data, Json
from corral.cli.common.output import DONE, console, print_json, print_line, print_note
from corral.cli.common.roles import copy_store, live_controllers
from corral.kit.errors import Conflict
from corral.kit.process import lock_holder

app = declare.App()
OnProgress = Callable[[str, int, int], None]
_ALIVE_WITHIN_S = 30.0


@app.command("migrate-store")
def migrate_store(
    to: Annotated[
        str,
        declare.Option("--to", metavar="URL", help="target: postgresql://USER@HOST/NAME, an empty database"),
    ],
    source: Annotated[
        str | None,
        declare.Option("--from", metavar="URL", help="source; without it, the SQLite database of the data folder"),
    ] = None,
    data: Data = None,
    as_json: Json = False,
) -> int:
    """Copy the database of a stopped fleet to PostgreSQL.

    The copy is verified. The source is not changed.

    Give the password in PGPASSWORD or ~/.pgpass: other users of this machine can read a password in the URL.

    \b
    Examples:
      corral migrate-store --to postgresql://corral@db/corral
      CORRAL_STORE=postgresql://corral@db/corral corral up        (afterwards)
    """
    folder = DataFolder(Path(data).expanduser().absolute() if data else default_data(os.environ))
    origin = source or f"sqlite:///{folder.database}"
    with _block_start(folder), _progress(quiet=as_json) as on_progress:
        copied = asyncio.run(_copy(origin, to, on_progress))
    if as_json:
        print_json([{"table": table, "rows": rows} for table, rows in copied])
        return DONE
    print_line(f"{sum(rows for _, rows in copied)} rows in {len(copied)} tables copied and verified.")
    print_note("Start the fleet with the new database: `CORRAL_STORE=postgresql://… corral up`")
    return DONE


async def _copy(origin: str, target: str, on_progress: OnProgress) -> list[tuple[str, int]]:
    alive = await live_controllers(origin, within_s=_ALIVE_WITHIN_S)
    if alive:
        raise Conflict(
            f"a controller on {', '.join(alive)} used this database less than {_ALIVE_WITHIN_S:.0f} s ago: "
            "stop every controller, wait 30 s and run this command again"
        )
    return await copy_store(origin, target, on_progress)


@contextlib.contextmanager
def _block_start(folder: DataFolder) -> Iterator[None]:
    """Keep `corral up` from starting during the copy: its writes would be lost."""
    holder = lock_holder(folder.lock)
    if holder is not None:
        raise Conflict(f"the fleet in {folder.root} is running (pid {holder or 'unknown'}): stop it first")
    if not folder.root.is_dir():
        yield
        return
    with lock_file(folder.lock):
        yield


@contextlib.contextmanager
def _progress(*, quiet: bool) -> Iterator[OnProgress]:
    """A progress bar on a terminal, nothing elsewhere."""
    if quiet or not sys.stderr.isatty():
        yield lambda table, copied, total: None
        return
    from rich.progress import Progress

    with Progress(console=console(sys.stderr), transient=True) as bar:
        tasks = {}

        def on_progress(table: str, copied: int, total: int) -> None:
            if table not in tasks:
                tasks[table] = bar.add_task(table, total=total)
            bar.update(tasks[table], completed=copied)

        yield on_progress
