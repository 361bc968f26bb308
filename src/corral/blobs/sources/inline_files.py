"""Small files that are part of the order: the whole of an inline source, or files added to another source."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from corral.blobs.digests import digest_of_parts
from corral.blobs.errors import UnsafeArchive, from_os
from corral.blobs.progress import OnProgress, Progress
from corral.contract.messages.backends import Phase
from corral.contract.sources import Source, TextFile, is_safe_path
from corral.kit.errors import Invalid
from corral.kit.threads import run_uncancelled

NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def digest_of_files(files: Sequence[TextFile]) -> str:
    parts = [(file.path, "x" if file.executable else "-", file.text) for file in sorted(files, key=lambda f: f.path)]
    return digest_of_parts("texts", *(part for row in parts for part in row))


def check_files(files: Sequence[TextFile]) -> None:
    for file in files:
        if not is_safe_path(file.path):
            raise Invalid(f"{file.path[:200]!r} is not a path inside the backend's folder")


async def write_files(folder: Path, files: Sequence[TextFile]) -> None:
    """Write into a folder with untrusted content: no link in it is followed."""
    check_files(files)
    try:
        for file in files:
            await run_uncancelled(_write, folder, file)
    except OSError as error:
        raise from_os(error, f"writing into {folder}") from error


@dataclass(frozen=True)
class InlineContent:
    """Has only the files of the order, which `contents.py` writes after every content."""

    digest: str
    name: str
    blobs: tuple[str, ...] = ()

    @property
    def content_digest(self) -> str:
        return self.digest

    async def write_to(self, _folder: Path, on_progress: OnProgress) -> None:
        on_progress(Progress(Phase.EXTRACTING, self.name))


def open_inline(source: Source) -> InlineContent:
    if not source.files:
        raise Invalid("an inline source has no files")
    check_files(source.files)
    return InlineContent(source.digest or digest_of_files(source.files), source.uri)


def _write(folder: Path, file: TextFile) -> None:
    *front, name = Path(file.path).parts
    here = folder
    for part in front:
        here = here / part
        if here.is_symlink():
            raise UnsafeArchive(f"{file.path!r} would be written through a link")
        here.mkdir(exist_ok=True)
    path = here / name
    path.unlink(missing_ok=True)
    descriptor = os.open(path, NEW_FILE, 0o755 if file.executable else 0o644)
    with os.fdopen(descriptor, "w", encoding="utf-8", newline="") as out:
        out.write(file.text)
