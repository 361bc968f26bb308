"""Digests on the wire: `sha256:` and 64 hex digits. No other algorithm or spelling is accepted."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from corral.contract.sources import is_digest
from corral.kit.errors import Invalid

PREFIX = "sha256:"
BLOCK_BYTES = 1 << 20


def check_digest(text: str) -> str:
    """Return the digest, or raise Invalid. A digest becomes a file name, so anything else must be refused."""
    if not is_digest(text):
        raise Invalid(f"{text[:100]!r} is not a digest: expected sha256: and 64 hex digits")
    return text


def hex_of(digest: str) -> str:
    return check_digest(digest).removeprefix(PREFIX)


def digest_of(data: bytes) -> str:
    return PREFIX + hashlib.sha256(data).hexdigest()


def digest_of_parts(*parts: str) -> str:
    """One digest for several texts. It covers their lengths, so that ("ab", "c") and ("a", "bc") differ."""
    whole = hashlib.sha256()
    for part in parts:
        data = part.encode("utf-8", "surrogateescape")
        whole.update(f"{len(data)}:".encode() + data)
    return PREFIX + whole.hexdigest()


def hash_file(path: Path, *, on_bytes: Callable[[int], None] | None = None) -> str:
    """Digest of a file. `on_bytes` is called with the size of every block, and may raise to stop."""
    whole = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            whole.update(block)
            if on_bytes is not None:
                on_bytes(len(block))
    return PREFIX + whole.hexdigest()
