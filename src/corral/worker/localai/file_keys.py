"""Keys of files, and the folders they lead to (docs/reference/wire/files.md#keys). Nothing here writes.

A key never leaves its folder, also not through symbolic links, and never reaches what Corral itself keeps there: its
store of model files, and unfinished uploads.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote_to_bytes

from corral.kit.errors import Invalid
from corral.worker.files.cleanup import BLOBS

MODELS, DATA = "models/", "data/"
EPHEMERAL = "ephemeral"  # files of requests
UPLOAD = ".corral-upload-"  # an unfinished upload, beside its target
RECORD = ".corral-object-"  # which version of an object a file is, beside it
UNFINISHED = (UPLOAD, ".corral-download-")
HIDDEN = (*UNFINISHED, RECORD)
OUTPUT = "localai-output-"
SIDECAR = ".sha256"
OUTSIDE = "outside allowed directory"


@dataclass(frozen=True)
class FileFolders:
    """The folders of the contract, beside the models folder. Each is created when it is first needed."""

    models: Path
    staging: Path
    data: Path
    cache: Path

    @classmethod
    def beside(cls, models: Path) -> FileFolders:
        around = models.absolute().parent
        return cls(models.absolute(), around / "staging", around / "data", around / "cache")


def decode_route(route: bytes) -> str:
    """A path of a request, percent-decoded once. Clients that do not encode keys are understood too."""
    return os.fsdecode(unquote_to_bytes(route))


def clean_route(path: str) -> str:
    """The path without `.`, `..` and empty parts: where a request with such parts is redirected to."""
    clean = "/" + posixpath.normpath(path).lstrip("/")
    return clean + "/" if path.endswith("/") and clean != "/" else clean


def quote_route(path: str) -> bytes:
    return quote(os.fsencode(path)).encode()


def resolve_key(folders: FileFolders, key: str) -> Path:
    """The file of a key of the HTTP routes. Raises Invalid."""
    if not key:
        raise Invalid("key is required")
    if key.startswith(MODELS):
        return resolve_inside(folders.models, key.removeprefix(MODELS))
    if key.startswith(DATA):
        return resolve_inside(folders.data, key.removeprefix(DATA))
    return resolve_inside(folders.staging, key)


def resolve_prefix(folders: FileFolders, prefix: str) -> Path:
    """The folder of a key prefix of the bus, where the third folder is the cache. Raises Invalid."""
    for start, folder in ((MODELS, folders.models), (DATA, folders.data)):
        if prefix == start.rstrip("/") or prefix.startswith(start):
            return resolve_inside(folder, prefix[len(start) :])
    return resolve_inside(folders.cache, prefix)


def resolve_inside(folder: Path, relative: str) -> Path:
    """`relative` below `folder`, with every symbolic link resolved; the file need not exist. Raises Invalid."""
    if any(ord(character) < 32 or ord(character) == 127 for character in relative):
        raise Invalid("a key has no control characters")
    base = os.path.realpath(folder)
    target = os.path.realpath(os.path.join(base, relative.lstrip("/")))
    if not is_inside(target, base):
        raise Invalid(f"{shorten(relative)}: {OUTSIDE}")
    inner = Path(target).relative_to(base).parts
    if inner and (inner[0] == BLOBS or inner[-1].startswith(HIDDEN)):
        raise Invalid(f"{shorten(relative)}: {OUTSIDE}")
    return Path(target)


def is_inside(target: str, folder: str) -> bool:
    """Whether one resolved path is the other or lies below it: `/models-old` is not below `/models`."""
    return target == folder or target.startswith(folder.rstrip("/") + "/")


def is_in_any(path: str, *folders: Path) -> bool:
    """Whether a path, with every symbolic link resolved, lies in one of these folders."""
    if not os.path.isabs(path) or "\0" in path:
        return False
    real = os.path.realpath(path)
    return any(is_inside(real, os.path.realpath(folder)) for folder in folders)


def list_files(folder: Path) -> list[str]:
    """Files below the folder, relative, in order. Linked folders are not followed, and entries that cannot be read are
    left out. Unfinished uploads and Corral's own store are not shown. Blocking."""
    return sorted(_walk(str(folder), ""))


def _walk(folder: str, front: str) -> Iterator[str]:
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return
    for entry in entries:
        if entry.name.startswith(HIDDEN) or (not front and entry.name == BLOBS) or not _is_text(entry.name):
            continue
        try:
            if entry.is_dir(follow_symlinks=False):
                yield from _walk(entry.path, f"{front}{entry.name}/")
            elif entry.is_file():
                yield front + entry.name
        except OSError:
            continue


def _is_text(name: str) -> bool:
    """A name that is not UTF-8 cannot be written as JSON."""
    return not any(0xDC80 <= ord(character) <= 0xDCFF for character in name)


def shorten(text: str) -> str:
    """A key for a line of text."""
    return repr(text if len(text) <= 200 else text[:200] + "…")
