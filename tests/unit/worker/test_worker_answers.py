"""What each answer of the controller means: wait, be somebody new, show the join token, or give up with a line."""

from __future__ import annotations

import pytest

from corral.worker.agent.answers import (
    Deleted,
    GiveUp,
    RegisterAgain,
    ShowJoinToken,
    Shown,
    TakeAnotherName,
    TryLater,
    error_message,
    read_call,
    read_registration,
)

ALL = (Shown.JOIN_TOKEN, Shown.NODE_TOKEN, Shown.ENROLMENT)


@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503, 504, 520, 599])
@pytest.mark.parametrize("shown", ALL)
@pytest.mark.parametrize("has_join_token", [True, False])
def test_time_cures(status: int, shown: Shown, has_join_token: bool) -> None:
    meaning = read_registration(status, "m", shown=shown, has_join_token=has_join_token, name="w1")
    assert meaning == TryLater(f"{status}: m")


@pytest.mark.parametrize("status", [400, 402, 404, 405, 409, 413, 418, 422, 501, 301, 302, 307, 308])
@pytest.mark.parametrize("shown", ALL)
@pytest.mark.parametrize("has_join_token", [True, False])
def test_time_does_not_cure(status: int, shown: Shown, has_join_token: bool) -> None:
    meaning = read_registration(status, "reason", shown=shown, has_join_token=has_join_token, name="w1")
    assert isinstance(meaning, GiveUp)
    assert "\n" not in meaning.line
    assert "reason" in meaning.line or "node API" in meaning.line


@pytest.mark.parametrize("status", [401, 403])
@pytest.mark.parametrize(
    ("shown", "has_join_token", "words"),
    [
        (Shown.JOIN_TOKEN, True, ("join token", "expired", "`corral token create`")),
        (Shown.NODE_TOKEN, False, ("`corral nodes replace w1`", "expired")),
        (Shown.ENROLMENT, False, ("does not know this node", "`corral token create`")),
    ],
)
def test_refused_credentials_say_what_to_do(
    status: int, shown: Shown, has_join_token: bool, words: tuple[str, ...]
) -> None:
    meaning = read_registration(status, "expired", shown=shown, has_join_token=has_join_token, name="w1")
    assert isinstance(meaning, GiveUp)
    assert all(word in meaning.line for word in words)


@pytest.mark.parametrize("status", [401, 403])
@pytest.mark.parametrize("shown", [Shown.NODE_TOKEN, Shown.ENROLMENT])
def test_a_refused_node_token_makes_way_for_a_join_token(status: int, shown: Shown) -> None:
    meaning = read_registration(status, "m", shown=shown, has_join_token=True, name="w1")
    assert meaning == ShowJoinToken("m")


@pytest.mark.parametrize("shown", ALL)
def test_deleted(shown: Shown) -> None:
    assert read_registration(410, "m", shown=shown, has_join_token=True, name="w1") == Deleted("m")
    meaning = read_registration(410, "m", shown=shown, has_join_token=False, name="w1")
    assert isinstance(meaning, GiveUp)
    assert "deleted" in meaning.line


def test_a_taken_name_is_told_in_the_controllers_words() -> None:
    words = "the name w1 is taken; run corral nodes replace w1"
    assert read_registration(409, words, shown=Shown.JOIN_TOKEN, has_join_token=True, name="w1") == GiveUp(words)
    by_default = read_registration(
        409, words, shown=Shown.JOIN_TOKEN, has_join_token=True, name="w1", name_was_chosen=False
    )
    assert by_default == TakeAnotherName()


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (404, RegisterAgain),
        (401, RegisterAgain),
        (403, RegisterAgain),
        (410, Deleted),
        (400, TryLater),
        (429, TryLater),
        (500, TryLater),
        (503, TryLater),
        (302, TryLater),
    ],
)
def test_calls_of_a_registered_node(status: int, kind: type) -> None:
    assert isinstance(read_call(status, "m"), kind)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error":{"code":401,"message":"used up","type":"node_error"}}', "used up"),
        (b'{"error":"registration token required"}', "registration token required"),
        (b"<html>\n bad   gateway</html>", "<html> bad gateway</html>"),
        (b"", "no reason given"),
        (b"null", "null"),
        (b'{"error":{}}', '{"error":{}}'),
        (b"\xff\xfe", "\ufffd\ufffd"),
        (b"x" * 500, "x" * 400 + "…"),
    ],
)
def test_error_message(body: bytes, message: str) -> None:
    assert error_message(body) == message
