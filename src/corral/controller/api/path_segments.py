"""Names of models may have slashes in them (`org/model`) and still be one segment of a path, written `org%2Fmodel`.

Servers decode a path before they split it into segments. So, for routes with names of models, the segments are found
in the path as it was sent: a slash that was written %2F is replaced by a character that no name contains, until the
handler that takes the name restores it.
"""

from __future__ import annotations

import re
from collections.abc import MutableMapping
from typing import Any
from urllib.parse import unquote

_PLACES = (b"/api/models/", b"/api/nodes/scheduling/", b"/internal/loads/", b"/api/why/models/")
_SLASH = re.compile(b"%2f", re.IGNORECASE)
_KEPT = "\x1f"  # not a character that can be printed, so not one of a name


def keep_segments(scope: MutableMapping[str, Any]) -> None:
    """Called with every request before it is routed."""
    if scope["type"] != "http":
        return
    raw: bytes = scope.get("raw_path") or b""
    raw = raw.partition(b"?")[0]
    if raw.startswith(_PLACES) and _SLASH.search(raw):
        scope["path"] = _KEPT.join(unquote(part.decode("latin-1")) for part in _SLASH.split(raw))


def whole_name(segment: str) -> str:
    """The name in a segment, with its slashes."""
    return segment.replace(_KEPT, "/")
