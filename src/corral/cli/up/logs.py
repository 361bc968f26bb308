"""The output of child processes: rotating files, the last lines in memory, and optionally the terminal."""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
from collections import deque
from pathlib import Path
from typing import TextIO

KEPT_FILES = 3
MAX_LINE = 4096


class RotatingFile:
    """An append-only file that is rotated to `.1`, `.2` … at its maximum size. A full disk only loses lines."""

    def __init__(self, path: Path, *, max_bytes: int, keep: int = KEPT_FILES) -> None:
        self.path = path
        self.lost_bytes = 0
        self._max_bytes = max_bytes
        self._keep = keep
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - closed by `close`

    def write(self, data: bytes) -> None:
        try:
            if self._file.tell() + len(data) > self._max_bytes and self._file.tell() > 0:
                self._rotate()
            self._file.write(data)
        except OSError:
            self.lost_bytes += len(data)

    def _rotate(self) -> None:
        self._file.close()
        for number in range(self._keep - 1, 0, -1):
            older = self.path.with_name(f"{self.path.name}.{number}")
            newer = self.path.with_name(f"{self.path.name}.{number - 1}") if number > 1 else self.path
            with contextlib.suppress(FileNotFoundError):
                newer.replace(older)
        self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115

    def close(self) -> None:
        self._file.close()


class LastLines:
    """The last lines of output, to show why a process ended."""

    def __init__(self, lines: int = 12) -> None:
        self._lines: deque[str] = deque(maxlen=lines)
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Add bytes; return the lines that they completed."""
        parts = (self._rest + data).split(b"\n")
        self._rest = parts.pop()[-MAX_LINE:]
        for part in parts:
            if text := part.decode("utf-8", errors="replace").strip():
                self._lines.append(text[:MAX_LINE])
        return parts

    def lines(self) -> list[str]:
        rest = self._rest.decode("utf-8", errors="replace").strip()
        return [*self._lines, rest] if rest else list(self._lines)

    def clear(self) -> None:
        self._lines.clear()
        self._rest = b""


class TerminalWriter:
    """Writes lines to the terminal in its own thread: a terminal stopped with Ctrl-S must not block the fleet."""

    def __init__(self, stream: TextIO | None = None, *, max_lines: int = 1000) -> None:
        self._stream = stream or sys.stderr
        self._lines: queue.Queue[str | None] = queue.Queue(maxsize=max_lines)
        self._thread = threading.Thread(target=self._write, name="echo", daemon=True)
        self._thread.start()

    def line(self, text: str) -> None:
        with contextlib.suppress(queue.Full):  # the terminal is blocked; the log files have the line
            self._lines.put_nowait(text)

    def close(self, timeout_s: float = 1.0) -> None:
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait(None)
        self._thread.join(timeout_s)

    def _write(self) -> None:
        while (text := self._lines.get()) is not None:
            try:
                print(text, file=self._stream, flush=True)
            except (OSError, ValueError):  # the terminal is closed; the fleet continues
                return
