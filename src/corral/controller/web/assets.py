"""The scripts, the style sheets and the mark: read once, named by content, so that a browser may keep them for ever."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources

_TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_IMPORT = re.compile(r'(?<=from "\./)([a-z]+\.js)(?=")')


@dataclass(frozen=True)
class Asset:
    content: bytes
    media_type: str
    tag: str


class Assets:
    def __init__(self, files: Mapping[str, bytes]) -> None:
        self._files = files
        self._assets: dict[str, Asset] = {}
        for name in files:
            self._add(name)

    def url(self, name: str) -> str:
        return f"/static/{name}?v={self._assets[name].tag}"

    def find(self, name: str) -> Asset | None:
        return self._assets.get(name)

    def _add(self, name: str) -> Asset:
        """A script names those it imports by their content too: a page never mixes the modules of two releases."""
        if name not in self._assets:
            content = self._files[name]
            if name.endswith(".js"):
                content = _IMPORT.sub(
                    lambda found: f"{found[1]}?v={self._add(found[1]).tag}", content.decode()
                ).encode()
            kind = _TYPES[name[name.rindex(".") :]]
            self._assets[name] = Asset(content, kind, hashlib.sha256(content).hexdigest()[:16])
        return self._assets[name]

    def _tagged(self, found: re.Match[str]) -> str:
        return f"{found[1]}?v={self._add(found[1]).tag}"


def load_assets() -> Assets:
    folder = resources.files("corral.controller.web") / "static"
    return Assets({entry.name: entry.read_bytes() for entry in folder.iterdir() if entry.is_file()})


def cache_rule(asset: Asset, if_none_match: str) -> str:
    """For ever only if the address names this very content: during an upgrade another controller's page may ask for
    content that we do not have, and must not be left with ours under its name."""
    return "public, max-age=31536000, immutable" if if_none_match == asset.tag else "no-cache"
