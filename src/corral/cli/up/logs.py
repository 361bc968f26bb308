"""What children say: into files that cannot grow without end, the last lines in memory, to the terminal if asked."""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
from collections import deque
from pathlib import Path
from typing import TextIO

_KEPT_FILES = 3
_LONGEST_LINE = 4096


class RotatingFile:
    """Appends; put aside as `.1`, `.2` … when it has reached its size. A full disk loses lines, never the fleet."""

    def __init__(self, path: Path, *, max_bytes: int, keep: int = _KEPT_FILES) -> None:
        self.path = path
        self.lost_bytes = 0
        self._max_bytes = max_bytes
        self._keep = keep
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - closed by `close`

    def write(self, data: bytes) -> None:
        try:
            if self._file.tell() + len(data) > self._max_bytes and self._file.tell() > 0:
                self._turn()
            self._file.write(data)
        except OSError:
            self.lost_bytes += len(data)

    def _turn(self) -> None:
        self._file.close()
        for number in range(self._keep - 1, 0, -1):
            older = self.path.with_name(f"{self.path.name}.{number}")
            newer = self.path.with_name(f"{self.path.name}.{number - 1}") if number > 1 else self.path
            with contextlib.suppress(FileNotFoundError):
                newer.replace(older)
        self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115

    def close(self) -> None:
        self._file.close()


class Tail:
    """The last lines, for the moment somebody has to be told why a process ended."""

    def __init__(self, lines: int = 12) -> None:
        self._lines: deque[str] = deque(maxlen=lines)
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Takes bytes; returns the lines they completed."""
        parts = (self._rest + data).split(b"\n")
        self._rest = parts.pop()[-_LONGEST_LINE:]
        for part in parts:
            if text := part.decode("utf-8", errors="replace").strip():
                self._lines.append(text[:_LONGEST_LINE])
        return parts

    def lines(self) -> list[str]:
        rest = self._rest.decode("utf-8", errors="replace").strip()
        return [*self._lines, rest] if rest else list(self._lines)

    def clear(self) -> None:
        self._lines.clear()
        self._rest = b""


class Echo:
    """Lines to the terminal, by a thread of its own: a terminal held with Ctrl-S must not hold the fleet."""

    def __init__(self, stream: TextIO | None = None, *, waiting: int = 1000) -> None:
        self._stream = stream or sys.stderr
        self._lines: queue.Queue[str | None] = queue.Queue(maxsize=waiting)
        self._thread = threading.Thread(target=self._write, name="echo", daemon=True)
        self._thread.start()

    def line(self, text: str) -> None:
        with contextlib.suppress(queue.Full):  # nobody reads: the files have it
            self._lines.put_nowait(text)

    def close(self, timeout_s: float = 1.0) -> None:
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait(None)
        self._thread.join(timeout_s)

    def _write(self) -> None:
        while (text := self._lines.get()) is not None:
            try:
                print(text, file=self._stream, flush=True)
            except (OSError, ValueError):  # the terminal is gone; the fleet stays
                return
