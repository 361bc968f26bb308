"""What people and scripts read: tables and JSON on stdout, notes and errors on stderr.

JSON is stable: every field is always present, and a command with `--json` prints nothing else on stdout. Text from
other machines (names, reasons) is printed without markup and without terminal escape sequences.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TextIO

from corral.kit.durations import format_duration
from corral.kit.humanize import format_bytes

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from corral.client.resources.logs import LogLine

OnTableProgress = Callable[[str, int, int], None]  # table, copied rows, total rows
QUIET = "CORRAL_QUIET"  # set by `--quiet`
DONE, FAILED, USAGE, STILL_RUNNING, INTERRUPTED = 0, 1, 2, 3, 130
STATUS_STYLES = {
    "healthy": "green",
    "active": "green",
    "ok": "green",
    "success": "green",
    "done": "green",
    "completed": "green",
    "pending": "yellow",
    "draining": "yellow",
    "warn": "yellow",
    "queued": "yellow",
    "waiting": "yellow",
    "downloading": "cyan",
    "running_on_worker": "cyan",
    "running": "cyan",
    "unhealthy": "red",
    "offline": "red",
    "fail": "red",
    "failed": "red",
    "failing": "red",
    "error": "red",
    "revoked": "dim",
    "expired": "dim",
    "used": "dim",
    "skipped": "dim",
    "superseded": "dim",
    "withdrawn": "dim",
    "cancelled": "dim",
}


def replace_unencodable() -> None:
    """Show a character that the terminal cannot encode as a question mark instead of ending the command."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def close_broken_stdout() -> None:
    """`corral nodes list | head` closed the pipe. Without this the interpreter reports the same error at exit."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def print_line(line: str = "") -> None:
    """Print a line of the result on stdout."""
    print(line, file=sys.stdout, flush=True)


def print_note(line: str) -> None:
    """Print a hint or a summary for people on stderr, so that scripts that read stdout do not see it. Not with
    `--quiet`."""
    if not is_quiet():
        print(line, file=sys.stderr, flush=True)


def is_quiet() -> bool:
    return bool(os.environ.get(QUIET))


def print_error(message: str) -> None:
    """Print each line of the message on stderr with the prefix `corral: `."""
    for line in message.splitlines() or [""]:
        print(f"corral: {printable(line)}", file=sys.stderr, flush=True)


def printable(text: str) -> str:
    """The text with every control character replaced, so that it cannot control the terminal."""
    return "".join(letter if letter.isprintable() else "�" for letter in text)


def console(stream: TextIO | None = None) -> Console:
    """Colour only on a terminal and never with NO_COLOR; no line wrapping when the output is a file or a pipe."""
    from rich.console import Console

    stream = stream or sys.stdout
    return Console(
        file=stream,
        no_color="NO_COLOR" in os.environ or None,
        width=None if stream.isatty() else 100_000,
        highlight=False,
        markup=False,
        emoji=False,
    )


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Build a table. Columns in which every cell is empty are left out."""
    from rich.table import Table
    from rich.text import Text

    lines = _printable_cells(rows)
    used = _used_columns(columns, lines)
    shown = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", show_edge=False)
    for at in used:
        shown.add_column(columns[at], overflow="fold", no_wrap=False)
    for line in lines:
        shown.add_row(*(Text(line[at], style=STATUS_STYLES.get(line[at], "")) for at in used))
    return shown


def _printable_cells(rows: Iterable[Sequence[str]]) -> list[tuple[str, ...]]:
    return [tuple(printable(cell) for cell in row) for row in rows]


def _used_columns(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> list[int]:
    return [at for at in range(len(columns)) if not lines or any(line[at] for line in lines)]


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, empty: str) -> None:
    if not rows:
        print_note(empty)
        return
    if not _has_styles():
        lines = text_lines(columns, rows)
    elif (width := _plain_terminal_width()) and widest(columns, rows) <= width:
        lines = text_lines(columns, rows, styles=True)
    else:
        lines = _rendered(columns, rows, console())
    for line in lines:
        print_line(line)


def _has_styles() -> bool:
    """Whether stdout gets colours and a width. The two variables are those with which a user makes rich treat a pipe as
    a terminal."""
    return sys.stdout.isatty() or bool(os.environ.get("FORCE_COLOR") or os.environ.get("TTY_COMPATIBLE"))


def _plain_terminal_width() -> int:
    """0 where rich has to decide how the terminal is used."""
    asks_rich = ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS", "NO_COLOR")
    if any(name in os.environ for name in asks_rich) or os.environ.get("TERM", "dumb") in ("dumb", "unknown"):
        return 0
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns
    except OSError:
        return 0


def text_lines(columns: Sequence[str], rows: Iterable[Sequence[str]], *, styles: bool = False) -> list[str]:
    """The table for a file or a pipe, or for a terminal that is wide enough for it: the same lines as rich's, without
    the time of importing rich."""
    lines, widths = _aligned(columns, rows)
    shown = [_text_line(line, widths, _BODY_STYLES if styles else {}) for line in lines]
    if styles:
        shown[0] = f"{_BOLD}{shown[0]}{_PLAIN}"
    return shown


_BOLD, _PLAIN = "\x1b[1m", "\x1b[0m"
_CODES = {"green": "\x1b[32m", "yellow": "\x1b[33m", "cyan": "\x1b[36m", "red": "\x1b[31m", "dim": "\x1b[2m"}
_BODY_STYLES = {word: _CODES[style] for word, style in STATUS_STYLES.items()}


def widest(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> int:
    """The width of the table."""
    _, widths = _aligned(columns, rows)
    return sum(widths) + 2 * (len(widths) - 1)


def _aligned(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> tuple[list[list[str]], list[int]]:
    """The cells of the columns that are used, with the heading, and the width of each column."""
    lines = _printable_cells(rows)
    cells = [[line[at] for at in _used_columns(columns, lines)] for line in (tuple(columns), *lines)]
    return cells, [max(map(_width, column)) for column in zip(*cells, strict=True)]


def _text_line(cells: Sequence[str], widths: Sequence[int], styles: Mapping[str, str]) -> str:
    padded = []
    for at, (cell, width) in enumerate(zip(cells, widths, strict=True)):
        style = styles.get(cell, "")
        space = " " * (width - _width(cell)) if any(cells[at + 1 :]) else ""
        padded.append((f"{style}{cell}{_PLAIN}" if style else cell) + space)
    return "  ".join(padded).rstrip()


def _width(text: str) -> int:
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def table_lines(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> list[str]:
    """A table as lines of plain text; cells that are too long for `width` continue on the next line."""
    from rich.console import Console

    return _rendered(columns, rows, Console(width=width, color_system=None, markup=False, emoji=False))


def _rendered(columns: Sequence[str], rows: Sequence[Sequence[str]], screen: Console) -> list[str]:
    with screen.capture() as captured:
        screen.print(table(columns, rows))
    return [line.rstrip() for line in captured.get().splitlines()]


def key_value_lines(pairs: Iterable[tuple[str, str]]) -> Iterator[str]:
    """`key  value`, one per line. Pairs with an empty value are left out."""
    shown = [(key, value) for key, value in pairs if value]
    width = max((len(key) for key, _ in shown), default=0)
    for key, value in shown:
        yield f"{key:<{width}}  {printable(value)}"


def abbreviate(names: Sequence[str], max_names: int = 5) -> str:
    """The first names, and the number of those left out: `attic, barn and 3 more`."""
    return ", ".join(names[:max_names]) + (f" and {len(names) - max_names} more" if len(names) > max_names else "")


def print_json(value: object, *, indent: int | None = 2) -> None:
    import json

    print_line(json.dumps(as_plain_data(value), indent=indent, ensure_ascii=False))


def as_plain_data(value: object) -> Any:
    """Every field as JSON types, including fields that the wire format omits because they have their default value."""
    fields = getattr(value, "__struct_fields__", None)  # of a message; without importing msgspec, which lists do not
    if fields is not None:
        return {name: as_plain_data(getattr(value, name)) for name in fields}
    if isinstance(value, Mapping):
        return {str(key): as_plain_data(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_plain_data(item) for item in value]
    return value


def free_of_total(available: int, total: int) -> str:
    return f"{format_bytes(available)} / {format_bytes(total)}" if total else ""


def relative_time(stamp: str, now: datetime | None = None) -> str:
    """RFC 3339 → `5s ago`, `in 2h`. Text that is not a timestamp is returned unchanged."""
    if not stamp or stamp.startswith("0001-"):
        return "never"
    try:
        moment = datetime.fromisoformat(stamp)
    except ValueError:
        return stamp
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    seconds = ((now or datetime.now(UTC)) - moment).total_seconds()
    span = format_duration(_rounded(abs(seconds)))
    return f"{span} ago" if seconds >= 0 else f"in {span}"


def _rounded(seconds: float) -> float:
    for step in (86400, 3600, 60, 1):
        if seconds >= 2 * step:
            return seconds // step * step
    return float(round(seconds))


def is_interactive() -> bool:
    """Whether a person can answer questions: stdin and stdout are a terminal."""
    return sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty()


@contextlib.contextmanager
def table_progress(*, quiet: bool) -> Iterator[OnTableProgress]:
    """A progress bar for each table that is copied, on a terminal; nothing elsewhere."""
    if quiet or is_quiet() or not sys.stderr.isatty():
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


def log_line(line: LogLine, *, timed: bool) -> str:
    """`timed`: with the time, which most backends write themselves and a worker does not."""
    at = f"{line.timestamp.partition('.')[0].removesuffix('Z')}Z " if timed and line.timestamp else ""
    return at + line.text
