"""Secrets in URLs. `https://user:password@host/x` is shown to people as `https://***@host/x`, and
`https://host/x?token=secret` as `https://host/x?token=***`. So are other parameters whose names say that they are
secret (`key`, `sig`, `access_token`, `X-Amz-Signature`), in whole URLs only: `?key=` in an address of our own page is a
filter.

A password should be percent-encoded in a URL. Where a slash, `?` or `#` in it is not, it is hidden as far as it can be
told from a path: not if all before that slash is digits (`user:12/34@host` reads as a port and a path).

A redacted text may come back: a user edits a definition, or applies an exported file. `restore` replaces the stars by
the stored credentials.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from corral.kit.errors import Invalid

_STARS = "***@"
# What ends a URL in JSON, HTML and prose. An authority also ends with a slash, a question mark or a hash.
_END = r"\s\"'<>\\"
_AUTHORITY = rf"[^{_END}/?#]"
_HOST_AND_PORT = rf"(?:\[{_AUTHORITY}*\]|[^{_END}/?#:@\[\]]*)(?::\d{{1,5}})?"
# A password with a raw slash, `https://user:pa/ss@host`: what stands before the slash is no host with a port. Which of
# several `@` begins the host is then unknown, so the last one does: rather too much is hidden. No further than this:
# backends write what they like into logs, and the time a text takes must not grow with its square.
_MAX_PASSWORD = 512
_RAW = rf"(?!(?:{_AUTHORITY}*@)?{_HOST_AND_PORT}[/?#]){_AUTHORITY}*[/?#][^{_END}]{{0,{_MAX_PASSWORD}}}"
# An image's digest (`oci://name@sha256:…`) is no host.
_USERINFO_PATTERN = rf"(?<=://)(?:{_RAW}|{_AUTHORITY}*)@(?!sha\d+:)"
_USERINFO = re.compile(_USERINFO_PATTERN)
_USERINFO_BYTES = re.compile(_USERINFO_PATTERN.encode())
_MAX_PATH = 2048  # before the question mark, for the same reason
_QUERY_PATTERN = rf"(?<=://)[^{_END}?]{{1,{_MAX_PATH}}}\?[^{_END}]+"
_SECRET_NAME = (
    r"(?:[\w.-]{0,40}(?:token|secret|signature|passw(?:or)?d|credentials?|api[_-]?key|access[_-]?key(?:[_-]?id)?)"
    r"|key|sig|auth|pwd)"
)
# Behind `;` in HTML, where `&` is `&amp;`.
_VALUE_PATTERN = rf"(?i:([?&;]{_SECRET_NAME}=))[^&#]+"
_QUERY, _QUERY_BYTES = re.compile(_QUERY_PATTERN), re.compile(_QUERY_PATTERN.encode())
_VALUE, _VALUE_BYTES = re.compile(_VALUE_PATTERN), re.compile(_VALUE_PATTERN.encode())
_HIDDEN_VALUE = re.compile(rf"(?i:[?&;]{_SECRET_NAME}=)\*\*\*(?=[&#]|$)")


def redact_urls(text: str) -> str:
    if "?" in text:
        text = _QUERY.sub(lambda url: _VALUE.sub(r"\1***", url[0]), text)
    return _USERINFO.sub(_STARS, text) if "@" in text else text


def remove_logins(text: str) -> str:
    """The URLs without user and password, as a machine may use them that must not know the login."""
    return _USERINFO.sub("", text) if "@" in text else text


def redact_url_bytes(body: bytes) -> bytes:
    if b"?" in body:
        body = _QUERY_BYTES.sub(lambda url: _VALUE_BYTES.sub(rb"\1***", url[0]), body)
    return _USERINFO_BYTES.sub(_STARS.encode(), body) if b"@" in body else body


def is_redacted(text: str) -> bool:
    return f"://{_STARS}" in text or any(_HIDDEN_VALUE.search(url) for url in _QUERY.findall(text))


def restore(value: Any, stored: Any) -> Any:
    """`value` with every redacted text replaced by the text of `stored` that is shown so. Raises Invalid where there is
    none, or more than one."""
    if not any(is_redacted(text) for text in _texts(value)):
        return value
    known: dict[str, set[str]] = {}
    for text in _texts(stored):
        known.setdefault(redact_urls(text), set()).add(text)
    return _restored(value, known)


def _restored(value: Any, known: Mapping[str, set[str]]) -> Any:
    match value:
        case str() if is_redacted(value):
            originals = known.get(value, set())
            if len(originals) != 1:
                raise Invalid(f"{value!r} hides a login or a secret: write them in place of the stars")
            return next(iter(originals))
        case Mapping():
            return {key: _restored(each, known) for key, each in value.items()}
        case list() | tuple():
            return [_restored(each, known) for each in value]
    return value


def _texts(value: Any) -> Iterator[str]:
    match value:
        case str():
            yield value
        case Mapping():
            for each in value.values():
                yield from _texts(each)
        case list() | tuple():
            for each in value:
                yield from _texts(each)
