"""Takes secrets out of texts that leave the machine: those that this machine knows, and what looks like one.

Logs have no secrets already (`kit/log.py`). This is for what other programs wrote, and for settings.
"""

from __future__ import annotations

import contextlib
import re
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from corral.cli.backup.parts import secret_files
from corral.cli.common.data_folder import DataFolder
from corral.kit.log import mask_secrets

_STARS = "***"
_MIN_LETTERS = 6  # a shorter text is in too many others
_NAME = r"pass(?:word|wd|phrase)?|secret|token|api[_-]?key|access[_-]?key(?:[_-]?id)?|seed|jwt|authorization|cookie"
_SECRET_NAME = re.compile(rf"(?i)(?:^|[_-])(?:{_NAME}|key)$")
_PATTERNS = (
    re.compile(r"-----BEGIN [A-Z ]*(?:PRIVATE KEY|SEED|JWT)-----.*?(?:-----END [A-Z ]*-----+|\Z)", re.DOTALL),
    re.compile(r"\b(?:hf_|sk-|ghp_|github_pat_|glpat-|xox[a-z]-|AKIA|ASIA)[A-Za-z0-9_-]{12,}"),
    re.compile(r"(?i)(?<=basic )[A-Za-z0-9+/=]{8,}"),
)
# `password: x`, `"token": "x"`, `--token x`, `?token=x`, `CORRAL_TOKEN=x`. A bare word after a space is no value.
_ASSIGNED = re.compile(
    rf"""(?i)((?:{_NAME})["']?\s*[=:]\s*["']?|--[\w-]*(?:{_NAME})\s+)(?!["'\s])[^\s"',;&)}}\]]{{4,}}"""
)


class Masker:
    def __init__(self, known: Iterable[str]) -> None:
        texts = {text for text in known if len(text) >= _MIN_LETTERS}
        longest_first = sorted(texts, key=lambda text: (-len(text), text))
        self._known = re.compile("|".join(map(re.escape, longest_first))) if texts else None

    def mask(self, text: str) -> str:
        if self._known is not None:
            text = self._known.sub(_STARS, text)
        for pattern in _PATTERNS:
            text = pattern.sub(_STARS, text)
        return _ASSIGNED.sub(lambda found: found[1] + _STARS, mask_secrets(text))


def known_secrets(folder: DataFolder, env: Mapping[str, str]) -> Iterator[str]:
    """Secrets of the fleet in this folder, and values of variables whose names say that they are secret."""
    for path in secret_files(folder):
        if path.suffix == ".crt":  # public
            continue
        text = path.read_text(errors="replace")
        yield text.strip()
        yield from re.findall(r"[A-Za-z0-9+/=_-]{16,}", text)  # lines of keys, values of JSON
    yield from _cluster_secrets(folder.database)
    for name, value in env.items():
        if _SECRET_NAME.search(name):
            yield value


def _cluster_secrets(database: Path) -> Iterator[str]:
    """Those of a SQLite database. Nothing if there is none, or if it cannot be read."""
    if not database.exists():
        return
    with (
        contextlib.suppress(sqlite3.Error),
        contextlib.closing(sqlite3.connect(f"{database.as_uri()}?mode=ro", uri=True)) as opened,
    ):
        yield from [str(value) for (value,) in opened.execute("SELECT value FROM cluster_secrets")]
