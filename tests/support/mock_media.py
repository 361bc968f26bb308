"""Reads at a client's end what the mock's media say (backends/mock/media.py)."""

from __future__ import annotations

import base64
import hashlib
import json
import struct
from typing import Any


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def image_size(content: bytes) -> tuple[int, int]:
    assert content.startswith(b"\x89PNG")
    width, height = struct.unpack_from(">II", content, 16)
    return width, height


def image_text(content: bytes) -> str:
    at = content.index(b"tEXt")
    (length,) = struct.unpack_from(">I", content, at - 4)
    return base64.b64decode(content[at + 4 : at + 4 + length].partition(b"\0")[2]).decode()


def image_request(content: bytes) -> dict[str, Any]:
    """The request that the mock got for this image."""
    return dict(json.loads(image_text(content)))


def video_request(content: bytes) -> dict[str, Any]:
    assert content[4:12] == b"ftypmp42"
    return dict(json.loads(content[12:]))


def object_request(content: bytes) -> dict[str, Any]:
    assert content.startswith(b"glTF")
    return dict(json.loads(content[4:]))


def sound_request(content: bytes) -> dict[str, Any]:
    assert content.startswith(b"RIFF")
    return dict(json.loads(content[44:].rstrip(b"\0")))
