"""Ranges of uploads, and what an upload does with the bytes that are there already
(docs/reference/wire/files.md#upload). Pure. Ranges of downloads are `blobs/serving/http_request.py`'s."""

from __future__ import annotations

import re
from dataclasses import dataclass

_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18})")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class UploadRange:
    """Bytes `start` to `end`, both included, of a file of `total` bytes."""

    start: int
    end: int
    total: int

    @property
    def length(self) -> int:
        return self.end - self.start + 1


def parse_content_range(text: str) -> UploadRange | None:
    """None if it cannot be used: `*` stands for nothing here, and an empty file has no range."""
    found = _CONTENT_RANGE.fullmatch(text.strip())
    if found is None:
        return None
    start, end, total = map(int, found.groups())
    return UploadRange(start, end, total) if start <= end < total else None


def parse_sha256(text: str) -> str | None:
    """Lower-case hex digits; empty if none is declared, None if it is no SHA-256."""
    digits = text.strip().lower()
    return digits if not digits or _SHA256.fullmatch(digits) else None


@dataclass(frozen=True)
class PartialState:
    """An unfinished upload: the bytes that are there, and what the whole will be, as far as it was declared."""

    have: int
    target: str = ""
    total: int = 0


@dataclass(frozen=True)
class AppendBytes:
    """Write behind the bytes that are there."""


@dataclass(frozen=True)
class DropBytes:
    """The bytes that are there belong to another file: drop them."""


@dataclass(frozen=True)
class FinishUpload:
    """All bytes are there, and were never confirmed: verify them, nothing need be sent."""


@dataclass(frozen=True)
class OtherUpload:
    """The bytes that are there belong to another file, and the client believes to continue it."""


@dataclass(frozen=True)
class WrongOffset:
    have: int


UploadStep = AppendBytes | DropBytes | FinishUpload | OtherUpload | WrongOffset


def decide_upload(span: UploadRange, declared: str, partial: PartialState | None) -> UploadStep:
    have = partial.have if partial is not None else 0
    if span.start == 0:
        if partial is None or not have:
            return DropBytes()
        if not declared or partial.target != declared:
            return DropBytes()
        return FinishUpload() if have >= span.total else WrongOffset(have)
    if partial is not None and (
        (partial.target and partial.target != declared) or (partial.total and partial.total != span.total)
    ):
        return OtherUpload()
    return AppendBytes() if span.start == have else WrongOffset(have)
