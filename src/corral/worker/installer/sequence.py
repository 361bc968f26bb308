"""A number that rises with each change of the inventory, also over restarts: who compares two lists knows the newer."""

from __future__ import annotations

from pathlib import Path

from corral.kit.files import read_text, write_atomically

SEQUENCE = ".sequence"


class Sequence:
    def __init__(self, path: Path) -> None:
        self._path = path
        self.value = 0

    def start(self) -> None:
        """One more than ever before: what changed while we were away counts as a change."""
        text = read_text(self._path) or ""
        self.value = max(self.value, int(text) if text.isdecimal() else 0)
        self.bump()

    def bump(self) -> None:
        self.value += 1
        write_atomically(self._path, f"{self.value}\n".encode())
