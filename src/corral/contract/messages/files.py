"""Files through an object store (contract: nats.md §4.11)."""

from __future__ import annotations

from corral.contract.codec import Message, always
from corral.contract.subjects import call


class EnsureFile(Message):
    key: str = always(str)


class LocalFile(Message):
    local_path: str = ""
    error: str = ""


class StageFile(Message):
    local_path: str = always(str)
    key: str = always(str)


class StagedFile(Message):
    key: str = ""
    error: str = ""


class MakeTempFile(Message):
    pass


class ListDir(Message):
    key_prefix: str = always(str)


class DirListing(Message):
    files: tuple[str, ...] = always(tuple)
    error: str = ""


ENSURE_FILE = call("nodes.{node}.files.ensure", EnsureFile, LocalFile)
STAGE_FILE = call("nodes.{node}.files.stage", StageFile, StagedFile)
TEMP_FILE = call("nodes.{node}.files.temp", MakeTempFile, LocalFile)
LIST_DIR = call("nodes.{node}.files.listdir", ListDir, DirListing)
