"""What the nouns need of the client, and nothing more."""

from __future__ import annotations

from typing import Protocol, TypeVar
from urllib.parse import quote

from corral.kit.errors import Invalid

T = TypeVar("T")


class Caller(Protocol):
    async def call(
        self, method: str, path: str, kind: type[T], body: object = None, *, timeout_s: float | None = None
    ) -> T: ...

    async def call_raw(
        self, method: str, path: str, body: object = None, *, timeout_s: float | None = None
    ) -> bytes: ...


def segment(text: str) -> str:
    """A name or id as one segment of a path. An empty one would be another path, and mean something else."""
    if not text.strip():
        raise Invalid("a name is needed, and this one is empty")
    # `.` and `..` would be taken for folders by everybody on the way; percent-encoding does not hide them either.
    return quote(text, safe="") if text not in (".", "..") else "%2E" * len(text)
