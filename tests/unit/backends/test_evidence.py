"""What a LocalAI worker reports, held against the build it was asked for."""

from __future__ import annotations

import pytest

from corral.controller.backends.evidence import compare
from corral.controller.inventory.installed import Installed

OLD, NEW = "sha256:old", "sha256:new"


@pytest.mark.parametrize(
    ("digest", "version", "since", "wanted_version", "found"),
    [
        (NEW, "", None, "", "matches"),
        (NEW, "1.0", None, "2.0", "matches"),
        (OLD, "", None, "", "differs"),
        (OLD, "2.0", None, "2.0", "differs"),
        (OLD, "2.0", OLD, "2.0", "matches"),
        (OLD, "1.0", "sha256:older", "2.0", "differs"),
        (OLD, "", OLD, "", "differs"),
        ("sha256:newest", "", OLD, "", "matches"),
        ("sha256:newest", "", "", "", "matches"),
        ("", "2.0", None, "2.0", "matches"),
        ("", "10.0", None, "9.1", "matches"),
        ("", "v2", None, "2", "matches"),
        ("", "1.9.9", None, "2.0", "differs"),
        ("", "nightly", None, "2.0", "differs"),
        ("", "", None, "2.0", "none"),
        ("", "", OLD, "2.0", "none"),
        ("", "1.0", None, "", "none"),
    ],
)
def test_what_is_reported_against_what_is_wanted(
    digest: str, version: str, since: str | None, wanted_version: str, found: str
) -> None:
    there = Installed(digest, "tuesday", version)
    assert compare(there, NEW, wanted_version, installed_since=since) == found


def test_a_mark_tells_whether_something_was_installed_since() -> None:
    before = Installed(OLD, "2026-01-01T00:00:00Z")
    assert before.digest_before(before.mark) is None
    assert Installed(OLD, "2026-01-02T00:00:00Z").digest_before(before.mark) == OLD
    assert Installed(OLD, "2026-01-02T00:00:00Z").digest_before("") == ""
    assert Installed(OLD, "2026-01-02T00:00:00Z").digest_before("2026-01-01T00:00:00Z") == "", "as rows of old have it"
