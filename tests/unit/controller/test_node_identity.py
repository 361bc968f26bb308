"""Who is knocking: each way in and each way out."""

from __future__ import annotations

import pytest

from corral.controller.registry.identity import (
    Buried,
    ByJoinToken,
    ByJoinTokenButTaken,
    BySharedToken,
    Knock,
    OnFile,
    Presented,
    SameNode,
    WasDeleted,
    who_knocks,
)
from corral.kit.secrets import digest

MINE = OnFile("token", digest("cn_mine"), digest("enrol-mine"))
OTHERS = OnFile("token", digest("cn_others"), digest("enrol-others"))
OPEN = OnFile("token", "", "")
LOCALAI = OnFile("shared", "", "")
GRAVE = Buried(digest("cn_mine"), digest("enrol-mine"))


@pytest.mark.parametrize(
    ("bearer", "enrolment", "protocol", "on_file", "buried", "expected"),
    [
        ("cn_mine", "", 1, MINE, None, SameNode(needs_token=False)),
        ("cj_used", "enrol-mine", 1, MINE, None, SameNode(needs_token=True)),
        ("cj_new", "enrol-other", 1, MINE, None, ByJoinTokenButTaken()),
        ("cj_new", "", 1, MINE, None, ByJoinTokenButTaken()),
        ("shared", "", 0, MINE, None, ByJoinTokenButTaken()),  # the shared token opens no node of ours
        ("cj_new", "enrol-new", 1, None, None, ByJoinToken(replaces=False)),
        ("cj_new", "enrol-new", 1, None, GRAVE, ByJoinToken(replaces=False)),
        ("cn_mine", "enrol-mine", 1, None, GRAVE, WasDeleted()),
        ("cj_new", "enrol-mine", 1, None, GRAVE, WasDeleted()),
        ("cn_mine", "enrol-mine", 1, OTHERS, GRAVE, WasDeleted()),  # the name is another machine's by now
        ("cn_mine", "enrol-mine", 1, OPEN, GRAVE, WasDeleted()),
        ("cn_mine", "enrol-mine", 1, MINE, GRAVE, SameNode(needs_token=False)),
        ("cj_new", "enrol-new", 1, OTHERS, GRAVE, ByJoinTokenButTaken()),
        ("cj_new", "enrol-new", 1, OPEN, None, ByJoinToken(replaces=True)),
        ("", "", 1, OPEN, None, ByJoinToken(replaces=True)),  # the empty token is then refused as a join token
        ("shared", "", 0, None, None, BySharedToken()),
        ("shared", "", 0, LOCALAI, None, BySharedToken()),
        ("shared", "", 1, None, None, ByJoinToken(replaces=False)),  # a Corral worker has no use for the shared token
        ("cj_new", "", 1, LOCALAI, None, ByJoinTokenButTaken()),
    ],
)
def test_who_knocks(
    bearer: str, enrolment: str, protocol: int, on_file: OnFile | None, buried: Buried | None, expected: Knock
) -> None:
    assert who_knocks(Presented(bearer, enrolment, protocol), on_file, buried, "shared") == expected


def test_without_compatibility_the_shared_token_opens_nothing() -> None:
    assert who_knocks(Presented("", "", 0), None, None, "") == ByJoinToken(replaces=False)
    assert who_knocks(Presented("", "", 0), LOCALAI, None, "") == ByJoinTokenButTaken()
