"""The list of configured galleries, in LocalAI's format (docs/reference/wire/gallery.md#gallery-sources). Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import datetime

import msgspec

from corral.contract.codec import Message, Undecodable, always, decode
from corral.kit.errors import Invalid

BUILT_IN_NAME = "corral"
LOCALAI_NAME = "localai"
DEFAULT_GALLERIES = (
    '[{"name":"localai","url":"https://index.localai.io/backends",'
    '"mirrors":["github:mudler/LocalAI/backend/index.yaml@master"]}]'
)
DEFAULT_MODEL_GALLERIES = (
    '[{"name":"localai","url":"https://index.localai.io/models",'
    '"mirrors":["github:mudler/LocalAI/gallery/index.yaml@master"]}]'
)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")


class Verification(Message, frozen=True):
    """The signers that a gallery requires for its images."""

    issuer: str = ""
    issuer_regex: str = ""
    identity: str = ""
    identity_regex: str = ""
    not_before: str = ""  # RFC 3339

    @property
    def requires_signature(self) -> bool:
        """Whether the policy requires a signature; an empty one does not."""
        return self != Verification()


class Gallery(Message, frozen=True):
    name: str = always(str)
    url: str = always(str)
    mirrors: tuple[str, ...] = ()
    verification: Verification | None = None

    @property
    def candidates(self) -> tuple[str, ...]:
        """The URLs to try, in order, without blanks and duplicates."""
        urls = (url.strip() for url in (self.url, *self.mirrors))
        return tuple(dict.fromkeys(url for url in urls if url))


BUILT_IN = Gallery(BUILT_IN_NAME, "builtin://index.yaml")


def parse_galleries(text: str) -> tuple[Gallery, ...]:
    """Parse the setting's JSON list. Raises Invalid with the name of the invalid gallery; an empty text means none."""
    if text.strip() in ("", "null"):  # Go encodes an empty list as null
        return ()
    try:
        galleries = decode(tuple[Gallery, ...], text.encode())
    except Undecodable as error:
        raise Invalid(
            f"the galleries are not a JSON list of {{name, url, mirrors?, verification?}}: {error}"
        ) from error
    seen = {BUILT_IN_NAME}
    for gallery in galleries:
        _check(gallery)
        if gallery.name.lower() in seen:
            raise Invalid(f"two galleries have the name {gallery.name!r}")
        seen.add(gallery.name.lower())
    return galleries


def check_galleries(text: str) -> str | None:
    """The error of the setting; None if it is valid."""
    try:
        parse_galleries(text)
    except Invalid as error:
        return error.message
    return None


def write_galleries(galleries: Iterable[Gallery]) -> str:
    """The JSON list for orders (`backend_galleries`), without the built-in gallery, which LocalAI's workers cannot
    read."""
    return msgspec.json.encode([gallery for gallery in galleries if gallery != BUILT_IN]).decode()


def _check(gallery: Gallery) -> None:
    if not _NAME.match(gallery.name):
        raise Invalid(
            f"{gallery.name[:64]!r} is not a valid name of a gallery: use letters, digits, dots, dashes and underscores"
        )
    if not gallery.candidates:
        raise Invalid(f"the gallery {gallery.name!r} has no url")
    if gallery.verification is not None:
        _check_verification(gallery.name, gallery.verification)


def _check_verification(name: str, policy: Verification) -> None:
    for key in ("issuer_regex", "identity_regex"):
        try:
            re.compile(getattr(policy, key))
        except re.error as error:
            raise Invalid(f"{key} of the gallery {name!r} is not a regular expression: {error}") from error
    try:
        since = datetime.fromisoformat(policy.not_before) if policy.not_before else None
    except ValueError as error:
        raise Invalid(f"not_before of the gallery {name!r} is not a time: {error}") from error
    if since is not None and since.tzinfo is None:
        raise Invalid(f"not_before of the gallery {name!r} has no time zone")
