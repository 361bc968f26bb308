"""Files that the installer writes beside those of backends: the record of a version, which also marks it as complete,
metadata.json, and the sequence number of the inventory."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from corral.blobs.digests import hex_of
from corral.contract.codec import Message, Undecodable, always, decode
from corral.contract.manifest import LOCALAI, Manifest
from corral.kit.files import read_text, write_atomically

METADATA = "metadata.json"
RUN_FILE = "run.sh"
SEQUENCE = ".sequence"

_VERSION_ID = re.compile(r"sha256-[0-9a-f]{64}(?:\.[1-9][0-9]{0,5})?\Z")


class Metadata(Message, frozen=True):
    """metadata.json (docs/reference/wire/gallery.md#metadatajson). Empty fields are left out."""

    name: str = ""
    alias: str = ""
    meta_backend_for: str = ""
    gallery_url: str = ""
    installed_at: str = ""
    version: str = ""
    uri: str = ""
    digest: str = ""


class VersionRecord(Message, frozen=True):
    """`versions/<id>.json`, written last, synced: without it the folder of that name is rubbish."""

    id: str = always(str)
    digest: str = ""  # as reported to the cluster; "" for what was imported and never had one
    also: tuple[str, ...] = ()  # other digests under which the same content was ordered
    content_digest: str = ""
    tree_digest: str = ""  # of the files as they were unpacked
    size_bytes: int = 0
    metadata: Metadata = msgspec.field(default_factory=Metadata)
    manifest: Manifest | None = None  # None: LocalAI's run.sh
    direct: bool = False  # somebody asked for this build by its own name
    made_at: str = ""  # UTC, so that texts compare as times do
    activated_at: str = ""  # UTC; empty: fetched aside, nobody switched to it yet
    replaces: str = ""  # id of what was current before it

    @property
    def how_to_run(self) -> Manifest:
        return self.manifest or LOCALAI

    def is_known_as(self, digest: str) -> bool:
        return digest == self.digest or digest in self.also


def version_id(content_digest: str, build: int = 1) -> str:
    """The folder's name. No colon: it would cut PATH-like variables in two. A forced install of what is there already
    gets a folder of its own, as the old one may be in use."""
    plain = f"sha256-{hex_of(content_digest)}"
    return plain if build == 1 else f"{plain}.{build}"


def is_version_id(text: str) -> bool:
    return _VERSION_ID.match(text) is not None


def write_metadata(folder: Path, metadata: Metadata) -> None:
    write_atomically(folder / METADATA, msgspec.json.format(msgspec.json.encode(metadata), indent=2) + b"\n")


def read_metadata(folder: Path) -> Metadata | None:
    """None where there is none that can be read: that is this backend's trouble, not everybody's."""
    try:
        return decode(Metadata, (folder / METADATA).read_bytes())
    except (OSError, Undecodable):
        return None


def write_record(path: Path, record: VersionRecord) -> None:
    write_atomically(path, msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n")


def read_record(path: Path) -> VersionRecord | None:
    try:
        record = decode(VersionRecord, path.read_bytes())
    except (OSError, Undecodable):
        return None
    return record if record.id == path.name.removesuffix(".json") else None


class Sequence:
    """A number that rises with each change of the inventory, also over restarts. Of two lists, the one with the higher
    number is newer."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.value = 0

    def start(self) -> None:
        """Continue after the stored number: changes that happened while the worker did not run count as one."""
        text = read_text(self._path) or ""
        self.value = max(self.value, int(text) if text.isdecimal() else 0)
        self.bump()

    def bump(self) -> None:
        self.value += 1
        write_atomically(self._path, f"{self.value}\n".encode())
