"""Who is knocking: each way in and each way out."""

from __future__ import annotations

import pytest

from corral.controller.registry.identity import (
    ByJoinToken,
    BySharedToken,
    DeletedNode,
    Identity,
    KnownNode,
    NameTaken,
    PresentedCredentials,
    SameNode,
    WasDeleted,
    identify,
)
from corral.kit.secrets import digest

MINE = KnownNode("token", digest("cn_mine"), digest("enrol-mine"))
OTHERS = KnownNode("token", digest("cn_others"), digest("enrol-others"))
OPEN = KnownNode("token", "", "")
LOCALAI = KnownNode("shared", "", "")
GRAVE = DeletedNode(digest("cn_mine"), digest("enrol-mine"))


@pytest.mark.parametrize(
    ("bearer", "enrolment", "protocol", "on_file", "buried", "expected"),
    [
        ("cn_mine", "", 1, MINE, None, SameNode(needs_token=False)),
        ("cj_used", "enrol-mine", 1, MINE, None, SameNode(needs_token=True)),
        ("cj_new", "enrol-other", 1, MINE, None, NameTaken()),
        ("cj_new", "", 1, MINE, None, NameTaken()),
        ("shared", "", 0, MINE, None, NameTaken()),  # the shared token opens no node of ours
        ("cj_new", "enrol-new", 1, None, None, ByJoinToken(replaces=False)),
        ("cj_new", "enrol-new", 1, None, GRAVE, ByJoinToken(replaces=False)),
        ("cn_mine", "enrol-mine", 1, None, GRAVE, WasDeleted()),
        ("cj_new", "enrol-mine", 1, None, GRAVE, WasDeleted()),
        ("cn_mine", "enrol-mine", 1, OTHERS, GRAVE, WasDeleted()),  # the name is another machine's by now
        ("cn_mine", "enrol-mine", 1, OPEN, GRAVE, WasDeleted()),
        ("cn_mine", "enrol-mine", 1, MINE, GRAVE, SameNode(needs_token=False)),
        ("cj_new", "enrol-new", 1, OTHERS, GRAVE, NameTaken()),
        ("cj_new", "enrol-new", 1, OPEN, None, ByJoinToken(replaces=True)),
        ("", "", 1, OPEN, None, ByJoinToken(replaces=True)),  # the empty token is then refused as a join token
        ("shared", "", 0, None, None, BySharedToken()),
        ("shared", "", 0, LOCALAI, None, BySharedToken()),
        ("shared", "", 1, None, None, ByJoinToken(replaces=False)),  # a Corral worker has no use for the shared token
        ("cj_new", "", 1, LOCALAI, None, NameTaken()),
    ],
)
def test_who_knocks(
    bearer: str,
    enrolment: str,
    protocol: int,
    on_file: KnownNode | None,
    buried: DeletedNode | None,
    expected: Identity,
) -> None:
    assert identify(PresentedCredentials(bearer, enrolment, protocol), on_file, buried, "shared") == expected


def test_without_compatibility_the_shared_token_opens_nothing() -> None:
    assert identify(PresentedCredentials("", "", 0), None, None, "") == ByJoinToken(replaces=False)
    assert identify(PresentedCredentials("", "", 0), LOCALAI, None, "") == NameTaken()
