"""The worker's own log, in memory, for people far from the machine (docs/reference/wire/files.md#the-workers-own-log).

A book of its own: the names of the backends' logs, which LocalAI controllers read too, stay as they are. Serving the
log writes nothing to it, so a reader does not read about itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import Iterator
from datetime import UTC, datetime

from corral.kit.log import line_formatter, mask_secrets
from corral.worker.supervisor.logs import LogBook
from corral.worker.supervisor.tail import LogLine

KEY = "worker"
MAX_TEXT = 4_000  # letters of a line
MAX_PARTS = 200  # lines of one entry, such as a traceback


@contextlib.contextmanager
def record_own_log(lines: int) -> Iterator[LogBook]:
    """Record what this process logs at its level while the block runs, the last `lines` lines. Call it on the loop."""
    book = LogBook(lines=lines)
    handler = _Recorder(book, asyncio.get_running_loop(), lines)
    root = logging.getLogger()
    root.addHandler(handler)
    try:
        yield book
    finally:
        root.removeHandler(handler)


class _Recorder(logging.Handler):
    """Any thread may log; the book belongs to the loop's."""

    def __init__(self, book: LogBook, loop: asyncio.AbstractEventLoop, lines: int) -> None:
        super().__init__()
        self.setFormatter(line_formatter())
        self._book = book
        self._loop = loop
        self._thread = threading.get_ident()
        self._waiting: deque[LogLine] = deque(maxlen=lines)  # of other threads, until the loop takes them

    def emit(self, record: logging.LogRecord) -> None:
        try:
            lines = lines_of(self.format(record), record.created)
        except Exception:
            self.handleError(record)
            return
        if threading.get_ident() == self._thread:
            self._book.append(KEY, lines)
            return
        is_expected = bool(self._waiting)
        self._waiting.extend(lines)
        if not is_expected:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody can read the log any more
                self._loop.call_soon_threadsafe(self._take)

    def _take(self) -> None:
        with self.lock or contextlib.nullcontext():
            lines = list(self._waiting)
            self._waiting.clear()
        self._book.append(KEY, lines)


def lines_of(text: str, at: float) -> list[LogLine]:
    """Secrets are masked field by field before; once more for the whole, since this text leaves the machine."""
    stamp = datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    return [LogLine(stamp, "stderr", part[:MAX_TEXT]) for part in mask_secrets(text).splitlines()[:MAX_PARTS]]
