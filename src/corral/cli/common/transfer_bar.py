"""The progress bar of bytes that this command hashes, sends or receives."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from corral.cli.common.output import console

OnBytes = Callable[[int], None]  # gets the number of bytes that are done


@contextmanager
def transfer_bar(name: str, total: int) -> Iterator[OnBytes]:
    """A bar on a terminal, nothing elsewhere: files of a script's output are not for drawings."""
    screen = console()
    if not sys.stdout.isatty() or screen.is_dumb_terminal:
        yield lambda _done: None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=screen, transient=True) as progress:
        task = progress.add_task(name, total=total)
        yield lambda done: progress.update(task, completed=done)
