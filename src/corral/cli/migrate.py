"""`corral migrate-store`: from SQLite to PostgreSQL, while nobody writes. The copying itself is the store's."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer

from corral.cli.folder import DataFolder, default_data
from corral.cli.output import DONE, console, print_json, remark, tell
from corral.cli.run import copy_store, live_controllers
from corral.cli.up.lock import hold
from corral.kit.errors import Conflict
from corral.kit.locks import holder_of

app = typer.Typer(rich_markup_mode=None, add_completion=False)
Step = Callable[[str, int, int], None]
_ALIVE_WITHIN_S = 30.0


@app.command("migrate-store")
def migrate_store(
    to: Annotated[
        str,
        typer.Option("--to", metavar="URL", help="postgresql://USER@HOST/NAME; an empty database", show_default=False),
    ],
    source: Annotated[
        str | None, typer.Option("--from", metavar="URL", help="the database to copy; else that of the data folder")
    ] = None,
    data: Annotated[Path | None, typer.Option("--data", metavar="PATH", help="data folder (CORRAL_DATA)")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="as JSON, nothing else on stdout")] = False,
) -> int:
    """Copy everything into another database and verify it. The fleet must be stopped; the old database stays as it is.

    The password is better in PGPASSWORD or ~/.pgpass than in the URL, where others can see it.

    \b
    Examples:
      corral migrate-store --to postgresql://corral@db/corral
      CORRAL_STORE=postgresql://corral@db/corral corral up        (afterwards)
    """
    folder = DataFolder(data.expanduser().absolute() if data else default_data(os.environ))
    origin = source or f"sqlite:///{folder.database}"
    with _nobody_starts(folder), _progress(quiet=as_json) as step:
        copied = asyncio.run(_copy(origin, to, step))
    if as_json:
        print_json([{"table": table, "rows": rows} for table, rows in copied])
        return DONE
    tell(f"{sum(rows for _, rows in copied)} rows in {len(copied)} tables copied and verified")
    remark("Start the fleet with the new database: CORRAL_STORE=postgresql://… corral up")
    return DONE


async def _copy(origin: str, target: str, step: Step) -> list[tuple[str, int]]:
    alive = await live_controllers(origin, within_s=_ALIVE_WITHIN_S)
    if alive:
        raise Conflict(
            f"a controller on {', '.join(alive)} used this database less than {_ALIVE_WITHIN_S:.0f} s ago: "
            "stop every controller, wait half a minute and try again"
        )
    return await copy_store(origin, target, step)


@contextlib.contextmanager
def _nobody_starts(folder: DataFolder) -> Iterator[None]:
    """What is written while we copy would be lost, so `up` stays out until we are done."""
    holder = holder_of(folder.lock)
    if holder is not None:
        raise Conflict(f"the fleet in {folder.root} runs (pid {holder or 'unknown'}): stop it first")
    if not folder.root.is_dir():
        yield
        return
    with hold(folder.lock):
        yield


@contextlib.contextmanager
def _progress(*, quiet: bool) -> Iterator[Step]:
    """A bar on a terminal, nothing elsewhere."""
    if quiet or not sys.stderr.isatty():
        yield lambda table, copied, total: None
        return
    from rich.progress import Progress

    with Progress(console=console(sys.stderr), transient=True) as bar:
        tasks = {}

        def step(table: str, copied: int, total: int) -> None:
            if table not in tasks:
                tasks[table] = bar.add_task(table, total=total)
            bar.update(tasks[table], completed=copied)

        yield step
