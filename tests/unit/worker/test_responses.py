"""What each answer of the controller means: wait, be somebody new, show the join token, or give up with a line."""

from __future__ import annotations

import pytest

from corral.worker.agent.controller import error_message
from corral.worker.agent.join.responses import (
    ChooseAnotherName,
    Credential,
    Deleted,
    GiveUp,
    RegisterAgain,
    TryLater,
    UseJoinToken,
    read_call,
    read_registration,
)

ALL = (Credential.JOIN_TOKEN, Credential.NODE_TOKEN, Credential.ENROLMENT)


@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503, 504, 520, 599])
@pytest.mark.parametrize("shown", ALL)
@pytest.mark.parametrize("has_join_token", [True, False])
def test_time_cures(status: int, shown: Credential, has_join_token: bool) -> None:
    meaning = read_registration(status, "m", credential=shown, has_join_token=has_join_token, name="w1")
    assert meaning == TryLater(f"{status}: m")


@pytest.mark.parametrize("status", [400, 402, 404, 405, 409, 413, 418, 422, 501, 301, 302, 307, 308])
@pytest.mark.parametrize("shown", ALL)
@pytest.mark.parametrize("has_join_token", [True, False])
def test_time_does_not_cure(status: int, shown: Credential, has_join_token: bool) -> None:
    meaning = read_registration(status, "reason", credential=shown, has_join_token=has_join_token, name="w1")
    assert isinstance(meaning, GiveUp)
    assert "\n" not in meaning.line
    assert "reason" in meaning.line or "node API" in meaning.line


@pytest.mark.parametrize("status", [401, 403])
@pytest.mark.parametrize(
    ("shown", "has_join_token", "words"),
    [
        (Credential.JOIN_TOKEN, True, ("join token", "expired", "`corral token create`")),
        (Credential.NODE_TOKEN, False, ("`corral nodes replace w1`", "expired")),
        (Credential.ENROLMENT, False, ("does not know this node", "`corral token create`")),
    ],
)
def test_refused_credentials_say_what_to_do(
    status: int, shown: Credential, has_join_token: bool, words: tuple[str, ...]
) -> None:
    meaning = read_registration(status, "expired", credential=shown, has_join_token=has_join_token, name="w1")
    assert isinstance(meaning, GiveUp)
    assert all(word in meaning.line for word in words)


@pytest.mark.parametrize("status", [401, 403])
@pytest.mark.parametrize("shown", [Credential.NODE_TOKEN, Credential.ENROLMENT])
def test_a_refused_node_token_makes_way_for_a_join_token(status: int, shown: Credential) -> None:
    meaning = read_registration(status, "m", credential=shown, has_join_token=True, name="w1")
    assert meaning == UseJoinToken("m")


@pytest.mark.parametrize("shown", ALL)
def test_deleted(shown: Credential) -> None:
    assert read_registration(410, "m", credential=shown, has_join_token=True, name="w1") == Deleted("m")
    meaning = read_registration(410, "m", credential=shown, has_join_token=False, name="w1")
    assert isinstance(meaning, GiveUp)
    assert "deleted" in meaning.line


def test_a_taken_name_is_told_in_the_controllers_words() -> None:
    words = "the name w1 is taken; run corral nodes replace w1"
    assert read_registration(409, words, credential=Credential.JOIN_TOKEN, has_join_token=True, name="w1") == GiveUp(
        words
    )
    by_default = read_registration(
        409, words, credential=Credential.JOIN_TOKEN, has_join_token=True, name="w1", name_was_chosen=False
    )
    assert by_default == ChooseAnotherName()


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
