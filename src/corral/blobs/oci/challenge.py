"""Parses `WWW-Authenticate` (RFC 7235): the authorization that a registry demands. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

# Possessive quantifiers (`++`) never backtrack: the header is untrusted, and may be nothing but spaces.
_SCHEME = re.compile(r"\s*+(?:,\s*+)?+(?P<scheme>[A-Za-z][A-Za-z0-9._-]*+)(?:\s++|\Z)")
_PARAMETER = re.compile(
    r"\s*+(?:,\s*+)?+(?P<name>[A-Za-z0-9._-]++)\s*+=\s*+(?:\"(?P<quoted>(?:[^\"\\]|\\.)*)\"|(?P<bare>[^\s,\"]+))"
)


@dataclass(frozen=True)
class Bearer:
    """A token from `realm`, for `service` and `scope`."""

    realm: str
    service: str = ""
    scope: str = ""


@dataclass(frozen=True)
class Basic:
    """User and password."""


def read_challenge(header: str) -> Bearer | Basic | None:
    """The best scheme that the header offers; None if it offers none that is supported."""
    offered = {scheme.lower(): parameters for scheme, parameters in _schemes(header)}
    bearer = offered.get("bearer", {})
    if bearer.get("realm"):
        return Bearer(bearer["realm"], bearer.get("service", ""), bearer.get("scope", ""))
    return Basic() if "basic" in offered else None


def _schemes(header: str) -> list[tuple[str, dict[str, str]]]:
    found: list[tuple[str, dict[str, str]]] = []
    at = 0
    while match := _SCHEME.match(header, at):
        at = match.end()
        parameters: dict[str, str] = {}
        while parameter := _PARAMETER.match(header, at):
            quoted, bare = parameter["quoted"], parameter["bare"]
            value = re.sub(r"\\(.)", r"\1", quoted) if quoted is not None else bare
            parameters[parameter["name"].lower()] = value
            at = parameter.end()
        found.append((match["scheme"], parameters))
    return found
