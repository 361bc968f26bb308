"""Compares the build that a LocalAI worker reports with the requested build. Pure
(docs/reference/wire/README.md#localai-peers).

A LocalAI worker looks the build up itself, in an index that it reads at most once an hour, and replies "success" also
when it reinstalled the same build. So the reported version or digest decides. If the worker reports neither, only the
time of the install is left: it shows that something was installed, not what.
"""

from __future__ import annotations

import re
from enum import StrEnum

from corral.controller.inventory.installed import Installed

UNVERIFIED = "unverified: the node reports neither version nor digest, only that it was installed again"
_NUMBERS = re.compile(r"v?(\d+(?:\.\d+)*)\Z")
_SHOWN = 19  # characters of a digest: sha256: and twelve


class Evidence(StrEnum):
    MATCHES = "matches"
    DIFFERS = "differs"
    NONE = "none"  # there is nothing to compare


def compare(
    there: Installed, digest: str, version: str, *, installed_since: str | None, by_digest: bool = False
) -> Evidence:
    """`digest` and `version` are those of the wanted build. `installed_since`: the digest before the order, if
    something was installed after it; else None. `by_digest`: a Corral worker, whose order contains the digest."""
    if there.digest and there.digest == digest:
        return Evidence.MATCHES
    both_digests, both_versions = bool(there.digest and digest), bool(there.version and version)
    if by_digest:
        return Evidence.DIFFERS if both_digests else Evidence.NONE
    if installed_since is None and both_digests:
        return Evidence.DIFFERS
    if both_versions:
        return Evidence.MATCHES if _is_at_least(there.version, version) else Evidence.DIFFERS
    if both_digests:
        # The worker pulls by tag: a digest that is new there may be newer than the one that was resolved here.
        return Evidence.DIFFERS if there.digest == installed_since else Evidence.MATCHES
    return Evidence.NONE


def why_not(there: Installed, digest: str, version: str) -> str:
    """A sentence for users: what the node reports instead of the wanted build."""
    has, wanted = f"digest {there.digest[:_SHOWN]}", digest[:_SHOWN]
    if there.version and version:
        has, wanted = f"version {there.version}", version
    return (
        f"the node still reports {has}, not {wanted}: a LocalAI worker keeps a gallery's index for up to an hour; "
        "the upgrade is tried again until the node reports it"
    )


def _is_at_least(found: str, wanted: str) -> bool:
    """Equal, or newer where both are plain numbers: the worker may have read the index after we did."""
    if found == wanted:
        return True
    pair = _NUMBERS.match(found), _NUMBERS.match(wanted)
    if pair[0] is None or pair[1] is None:
        return False
    return _parts(pair[0][1]) >= _parts(pair[1][1])


def _parts(text: str) -> list[int]:
    return [int(part) for part in text.split(".")]
