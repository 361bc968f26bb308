"""Installs from a URI of somebody's own, without a gallery (docs/reference/wire/gallery.md#direct-installs). Pure."""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from urllib.parse import unquote, urlsplit

from corral.contract.sources import DIRECTORY, FILE, HTTP, OCI, OCIFILE, PYPI, Source, parse_uri
from corral.gallery.backends.entries import BackendEntry
from corral.gallery.galleries import Gallery
from corral.kit.errors import Invalid

NOWHERE = Gallery("", "")  # what such an entry is from
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,199}\Z")
_ARCHIVE = re.compile(r"\.(?:tar(?:\.[a-z0-9]+)?|t[gxbz]z\d?|zip)\Z", re.IGNORECASE)


def direct_entry(uri: str, *, name: str = "", alias: str = "") -> BackendEntry:
    """The entry a gallery would have for it. Raises Invalid with what is missing."""
    source = parse_uri(uri)
    if source.kind == PYPI:
        raise Invalid("a package does not say how it is run; write an entry with a corral: manifest in a gallery")
    name = name or _name_of(source)
    if not name:
        raise Invalid(f"what is installed from {uri[:200]} needs a name")
    for each in (name, alias):
        if each and not _NAME.match(each):
            raise Invalid(f"{each[:64]!r} cannot be the name of a folder")
    return BackendEntry(gallery=NOWHERE, name=name, alias=alias, uri=uri.strip())


def why_not_for_localai(uri: str) -> str:
    """Why a LocalAI worker cannot be sent this URI; empty: it can. The contract has forms for images and folders only;
    the worker would take anything else for the name of a gallery entry."""
    source = parse_uri(uri)
    if source.kind in (OCI, OCIFILE) or (source.kind == DIRECTORY and not _ARCHIVE.search(source.uri)):
        return ""
    return (
        "a LocalAI worker installs by URI only images (oci://, ocifile://) and folders of its machine: "
        f"for {uri[:200]} write an entry in a gallery that it can read, or make an image of it"
    )


def _name_of(source: Source) -> str:
    """An image's last part is often shared by many builds, so an image must be named."""
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
