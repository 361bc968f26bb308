"""Reads a wheel of Corral: its version, and the list of its dependencies with their hashes, which is in the wheel."""

from __future__ import annotations

import io
import re
import zipfile
from dataclasses import dataclass
from email.parser import HeaderParser

from corral.kit.errors import Invalid

_MIGRATION = re.compile(r"corral/store/engine/migrations/versions/(\d{4})_\w+\.py\Z")
LOCKS = ("corral/_requirements.txt", "corral/_pip.txt")


@dataclass(frozen=True)
class WheelContents:
    version: str
    pinned: str  # requirements with hashes
    schema: str = ""  # its last migration of the database; empty: it has none


def read_contents(data: bytes, name: str) -> WheelContents:
    """`name` is for messages. Raises Invalid for a file that is no wheel of Corral."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            metadata = next(each for each in archive.namelist() if each.endswith(".dist-info/METADATA"))
            fields = HeaderParser().parsestr(archive.read(metadata).decode())
            schema = max((found[1] for each in archive.namelist() if (found := _MIGRATION.match(each))), default="")
            pinned = "".join(archive.read(each).decode() for each in LOCKS)
    except (zipfile.BadZipFile, StopIteration, KeyError, UnicodeDecodeError) as error:
        raise Invalid(f"{name} is no wheel of Corral, or is damaged") from error
    if fields.get("Name") != "corral" or not fields.get("Version"):
        raise Invalid(f"{name} is a wheel of {fields.get('Name')}, not of Corral")
    return WheelContents(str(fields["Version"]), pinned, schema)
