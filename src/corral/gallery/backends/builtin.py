"""The built-in gallery (docs/explanation/design.md#built-in-parts): its index and the files of Corral's own backends
are package data."""

from __future__ import annotations

from dataclasses import replace
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

import corral
from corral.contract.sources import TextFile
from corral.gallery.backends.entries import BUILTIN_SCHEME, BackendEntry, BackendIndex, read_index
from corral.gallery.galleries import BUILT_IN
from corral.gallery.index import Index
from corral.kit.errors import NotFound

_IN_A_CHECKOUT = Path(corral.__file__).parents[2] / "backends"
_IN_A_WHEEL = "_backends"  # see pyproject.toml
_IGNORED = ("__pycache__",)


def read_built_in() -> BackendIndex:
    """Raises if the installed package is damaged."""
    body = files("corral.gallery.backends").joinpath("builtin.yaml").read_bytes()
    index = read_index(BUILT_IN, body)
    backends = backends_folder()
    return Index(BUILT_IN, tuple(_with_files(entry, backends) for entry in index.entries), index.problems)


def backends_folder() -> Traversable:
    """The folder of Corral's own backends."""
    packaged = files("corral").joinpath(_IN_A_WHEEL)
    return packaged if packaged.is_dir() else _IN_A_CHECKOUT


def _with_files(entry: BackendEntry, backends: Traversable) -> BackendEntry:
    named = [
        _replace_text(file, _find(backends, file.text.removeprefix(BUILTIN_SCHEME)))
        if file.text.startswith(BUILTIN_SCHEME)
        else file
        for file in entry.files
    ]
    folder: list[TextFile] = []
    if entry.uri.startswith(BUILTIN_SCHEME):
        folder = read_folder(_find(backends, entry.uri.removeprefix(BUILTIN_SCHEME)))
    return replace(entry, files=tuple(sorted((*folder, *named), key=lambda file: file.path)))


def _replace_text(file: TextFile, source: Traversable) -> TextFile:
    return TextFile(file.path, source.read_text(encoding="utf-8"), file.executable)


def read_folder(folder: Traversable, prefix: str = "") -> list[TextFile]:
    """Every text file in the folder and its sub-folders, in a fixed order."""
    found: list[TextFile] = []
    for each in sorted(folder.iterdir(), key=lambda child: child.name):
        if each.name.startswith(".") or each.name in _IGNORED:
            continue
        if each.is_dir():
            found += read_folder(each, f"{prefix}{each.name}/")
        else:
            text = each.read_text(encoding="utf-8")
            # Not by the file's mode: a wheel does not keep it.
            found.append(TextFile(f"{prefix}{each.name}", text, executable=text.startswith("#!")))
    return found


def _find(backends: Traversable, path: str) -> Traversable:
    found = backends
    for part in path.split("/"):
        found = found.joinpath(part)
    if not (found.is_file() or found.is_dir()):
        raise NotFound(f"this installation of Corral has no {path} among its backends")
    return found
