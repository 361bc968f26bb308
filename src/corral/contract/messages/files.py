"""Files through an object store (docs/reference/wire/files.md#object-store)."""

from __future__ import annotations

from corral.contract.codec import Message, always
from corral.contract.subjects import call


class EnsureFile(Message, frozen=True):
    key: str = always(str)


class LocalFile(Message, frozen=True):
    local_path: str = ""
    error: str = ""


class StageFile(Message, frozen=True):
    local_path: str = always(str)
    key: str = always(str)


class StagedFile(Message, frozen=True):
    key: str = ""
    error: str = ""


class MakeTempFile(Message, frozen=True):
    pass


class ListDir(Message, frozen=True):
    key_prefix: str = always(str)


class DirListing(Message, frozen=True):
    files: tuple[str, ...] = always(tuple)
    error: str = ""


ENSURE_FILE = call("nodes.{node}.files.ensure", EnsureFile, LocalFile)
STAGE_FILE = call("nodes.{node}.files.stage", StageFile, StagedFile)
TEMP_FILE = call("nodes.{node}.files.temp", MakeTempFile, LocalFile)
LIST_DIR = call("nodes.{node}.files.listdir", ListDir, DirListing)
