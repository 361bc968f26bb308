"""Reads the log of a shim: numbered files that grow, rotate and are removed meanwhile."""

from __future__ import annotations

from pathlib import Path

from corral.contract.codec import Message, always
from corral.worker.supervisor.shim import LOG_FOLDER

BACKLOG_BYTES = 1024 * 1024


class LogLine(Message, frozen=True):
    """A line as docs/reference/wire/files.md#backend-logs has it."""

    timestamp: str = always(str)  # RFC 3339 with a fraction
    stream: str = always(str)  # stdout | stderr
    text: str = always(str)


class LogTail:
    """`read()` returns the lines since the last call. Blocking: call it in a thread."""

    def __init__(self, folder: Path, *, backlog_bytes: int = BACKLOG_BYTES) -> None:
        self._folder = folder / LOG_FOLDER
        self._backlog_bytes = backlog_bytes
        self._number = 0
        self._offset = 0
        self._rest = b""

    def read(self) -> list[LogLine]:
        """At most the last `backlog_bytes`: after much output only the end matters, and the files have the rest."""
        files = self._files()
        if not files:
            return []
        self._skip(files)
        data = bytearray(self._rest)
        for number, path in files:
            if number < self._number:
                continue
            if number > self._number:
                self._number, self._offset = number, 0
            data += self._read_on(path)
        *lines, rest = bytes(data).split(b"\n")
        self._rest = rest
        return [line for line in map(parse_line, lines) if line is not None]

    def _files(self) -> list[tuple[int, Path]]:
        try:
            return sorted((int(path.name), path) for path in self._folder.iterdir() if path.name.isdigit())
        except FileNotFoundError:
            return []

    def _skip(self, files: list[tuple[int, Path]]) -> None:
        """Skip lines that are too old."""
        left = self._backlog_bytes
        for number, path in reversed(files):
            begin = self._offset if number == self._number else 0
            size = _size(path)
            if number < self._number or size - begin > left:
                if number >= self._number:
                    # The cut falls inside a line, whose end is no line: `parse_line` drops it.
                    self._number, self._offset, self._rest = number, size - left, b""
                return
            left -= size - begin

    def _read_on(self, path: Path) -> bytes:
        try:
            with path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:  # rotated meanwhile
            return b""
        self._offset += len(data)
        return data


def parse_line(line: bytes) -> LogLine | None:
    timestamp, _, rest = line.partition(b" ")
    stream, space, text = rest.partition(b" ")
    if not space or stream not in (b"stdout", b"stderr") or len(timestamp) != 27:
        return None
    return LogLine(timestamp.decode(errors="replace"), stream.decode(), text.decode(errors="replace"))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
