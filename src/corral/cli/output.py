"""What a person or a script reads: tables and JSON on stdout, remarks and errors on stderr.

JSON is stable: every field is always there, and nothing else goes to stdout beside it. Text that came from elsewhere
(names, reasons) is shown as text: no markup, no escape sequences.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TextIO

import msgspec

from corral.kit.durations import format_duration

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

DONE, FAILED, USAGE, UNDER_WAY, INTERRUPTED = 0, 1, 2, 3, 130
_STYLES = {
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
    "under way": "cyan",
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


def tell(line: str = "") -> None:
    """A line of the answer itself."""
    print(line, file=sys.stdout, flush=True)


def remark(line: str) -> None:
    """A line for the person, which a script that reads stdout never meets."""
    print(line, file=sys.stderr, flush=True)


def complain(message: str) -> None:
    for line in message.splitlines() or [""]:
        remark(f"corral: {plain(line)}")


def plain(text: str) -> str:
    """Without what could steer a terminal."""
    return "".join(letter if letter.isprintable() else "�" for letter in text)


def console(stream: TextIO | None = None) -> Console:
    """Colour only on a terminal and never under NO_COLOR; no wrapping where nobody has a screen."""
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
    """A column without a word in it is left out."""
    from rich.table import Table
    from rich.text import Text

    lines = [tuple(plain(cell) for cell in row) for row in rows]
    used = [at for at in range(len(columns)) if not lines or any(line[at] for line in lines)]
    shown = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", show_edge=False)
    for at in used:
        shown.add_column(columns[at], overflow="fold", no_wrap=False)
    for line in lines:
        shown.add_row(*(Text(line[at], style=_STYLES.get(line[at], "")) for at in used))
    return shown


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, empty: str) -> None:
    if not rows:
        remark(empty)
        return
    screen = console()
    with screen.capture() as captured:
        screen.print(table(columns, rows))
    for line in captured.get().splitlines():
        tell(line.rstrip())


def pairs(words: Iterable[tuple[str, str]]) -> Iterator[str]:
    """`key  value`, one per line; what is empty is left out."""
    told = [(key, value) for key, value in words if value]
    width = max((len(key) for key, _ in told), default=0)
    for key, value in told:
        yield f"{key:<{width}}  {plain(value)}"


def some(names: Sequence[str], most: int = 5) -> str:
    """The first few, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def print_json(value: object, *, indent: int | None = 2) -> None:
    tell(json.dumps(as_plain_data(value), indent=indent, ensure_ascii=False))


def as_plain_data(value: object) -> Any:
    """Every field, also those the wire leaves out when they have their usual value: scripts need not ask first."""
    if isinstance(value, msgspec.Struct):
        return {name: as_plain_data(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, Mapping):
        return {str(key): as_plain_data(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_plain_data(item) for item in value]
    return value


def size(count: int) -> str:
    """Bytes as people say them: 24.0 GiB."""
    amount = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"


def free_of(available: int, total: int) -> str:
    return f"{size(available)} / {size(total)}" if total else ""


def ago(stamp: str, now: datetime | None = None) -> str:
    """RFC 3339 → `5s ago`, `in 2h`; whatever cannot be read is shown as it came."""
    if not stamp or stamp.startswith("0001-"):
        return "never"
    try:
        moment = datetime.fromisoformat(stamp)
    except ValueError:
        return stamp
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    seconds = ((now or datetime.now(UTC)) - moment).total_seconds()
    words = format_duration(_rounded(abs(seconds)))
    return f"{words} ago" if seconds >= 0 else f"in {words}"


def _rounded(seconds: float) -> float:
    for step in (86400, 3600, 60, 1):
        if seconds >= 2 * step:
            return seconds // step * step
    return float(round(seconds))


def interactive() -> bool:
    """Whether there is somebody to ask."""
    return sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty()
