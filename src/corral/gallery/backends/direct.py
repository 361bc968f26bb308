"""Installs from a user's own URI, without a gallery (docs/reference/wire/gallery.md#direct-installs). Pure."""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from urllib.parse import unquote, urlsplit

from corral.contract.sources import DIRECTORY, FILE, HTTP, OCI, OCIFILE, PYPI, Source, parse_uri
from corral.gallery.backends.entries import BackendEntry
from corral.gallery.galleries import Gallery
from corral.kit.errors import Invalid

NO_GALLERY = Gallery("", "")  # the gallery of such an entry
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,199}\Z")
_ARCHIVE = re.compile(r"\.(?:tar(?:\.[a-z0-9]+)?|t[gxbz]z\d?|zip)\Z", re.IGNORECASE)


def direct_entry(uri: str, *, name: str = "", alias: str = "") -> BackendEntry:
    """The entry that a gallery would have for the URI. Raises Invalid with what is missing."""
    source = parse_uri(uri)
    if source.kind == PYPI:
        raise Invalid("a package does not tell how to start it; write a gallery entry with a corral: manifest")
    name = name or _name_of(source)
    if not name:
        raise Invalid(f"the backend from {uri[:200]} needs a name")
    for each in (name, alias):
        if each and not _NAME.match(each):
            raise Invalid(f"{each[:64]!r} cannot be a folder name")
    return BackendEntry(gallery=NO_GALLERY, name=name, alias=alias, uri=uri.strip())


def why_not_for_localai(uri: str) -> str:
    """Why a LocalAI worker cannot install this URI; empty: it can. LocalAI supports images and folders only; its worker
    would take anything else for the name of a gallery entry."""
    source = parse_uri(uri)
    if source.kind in (OCI, OCIFILE) or (source.kind == DIRECTORY and not _ARCHIVE.search(source.uri)):
        return ""
    return (
        "a LocalAI worker installs by URI only images (oci://, ocifile://) and folders of its machine: "
        f"for {uri[:200]} write an entry in a gallery that it can read, or make an image of it"
    )


def _name_of(source: Source) -> str:
    """Empty for an image: the last part of its reference is often shared by many builds, so the user must name it."""
    match source.kind:
        case kind if kind == OCI:
            return ""
        case kind if kind == HTTP:
            return _without_ending(unquote(urlsplit(source.uri).path))
        case kind if kind in (FILE, DIRECTORY, OCIFILE):
            return _without_ending(source.uri)
    return ""


def _without_ending(path: str) -> str:
    name = PurePosixPath(path).name
    return _ARCHIVE.sub("", name)
