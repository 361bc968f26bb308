"""Names of models in paths: one segment each, whatever is in them."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote, unquote

import pytest

from corral.controller.api.path_segments import keep_segments, whole_name


@pytest.mark.parametrize("name", ["m", "org/m", "a%2Fb", "a%2Fb/c", "50%", "q?x#y", "\u00fcn\u00ef/c\u00f6d\u00e9"])
def test_every_name_comes_back_as_it_was(name: str) -> None:
    raw = f"/api/models/{quote(name, safe='')}/load"
    scope: dict[str, Any] = {"type": "http", "raw_path": raw.encode(), "path": unquote(raw)}
    keep_segments(scope)
    before, models, segment, verb = scope["path"].lstrip("/").split("/")
    assert (before, models, whole_name(segment), verb) == ("api", "models", name, "load")


def test_slashes_of_other_paths_are_slashes() -> None:
    scope: dict[str, Any] = {"type": "http", "raw_path": b"/api/nodes/a%2Fb", "path": "/api/nodes/a/b"}
    keep_segments(scope)
    assert scope["path"] == "/api/nodes/a/b"
