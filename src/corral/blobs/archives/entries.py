"""What an archive says it holds, one entry at a time, whatever the format. Nothing in it is believed yet."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    FILE = "file"
    FOLDER = "folder"
    LINK = "symbolic link"
    SAME = "hard link"  # another name of a file that is already there


@dataclass(slots=True)
class Entry:
    name: str
    kind: Kind
    size: int = 0
    mode: int = 0o644
    modified_s: float = 0.0  # 0: nobody says
    target: str = ""  # of a link: what it points to, or the other name
    data: Iterable[bytes | memoryview] = ()  # read it before the next entry, or not at all
