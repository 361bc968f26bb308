"""How a file that was inside an archive is named in the database: with all that it takes to get it again. Pure."""

from __future__ import annotations

from typing import NamedTuple
from urllib.parse import parse_qs, quote, unquote, urlencode, urlsplit

from corral.blobs.digests import PREFIX

SCHEME = "unpacked://"


class MemberUri(NamedTuple):
    archive: str  # digest
    member: str
    path: str  # of the archive among the model's files
    uri: str  # of the archive


def member_uri(told: MemberUri) -> str:
    where = urlencode({"path": told.path, "uri": told.uri})
    return f"{SCHEME}{told.archive.removeprefix(PREFIX)}/{quote(told.member)}?{where}"


def is_member(uri: str) -> bool:
    return uri.startswith(SCHEME)


def parse_member(uri: str) -> MemberUri:
    parts = urlsplit(uri)
    where = parse_qs(parts.query, keep_blank_values=True)
    return MemberUri(PREFIX + parts.netloc, unquote(parts.path.lstrip("/")), where["path"][0], where["uri"][0])
