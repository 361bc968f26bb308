"""Errors of engines, as clients are told them."""

from __future__ import annotations

import json

import pytest

from corral.inference.engine_errors import client_answer, may_be_explained

# As llama.cpp says them.
EMBEDDINGS = "This server does not support embeddings. Start it with `--embeddings`"
RERANKING = "This server does not support reranking. Start it with `--reranking`"
POOLING = "Pooling type 'none' is not OAI compatible. Please use a different pooling type"
IMAGE = "image input is not supported - hint: if this is unexpected, you may need to provide the mmproj"
AUDIO = "audio input is not supported - hint: if this is unexpected, you may need to provide the mmproj"


def told(status: int, words: str) -> tuple[int, dict[str, str]]:
    answer = json.dumps({"error": {"code": status, "message": words, "type": "server_error"}}).encode()
    status, _, body = client_answer("tiny", status, answer)
    return status, json.loads(body)["error"]


@pytest.mark.parametrize(
    ("status", "words", "code", "says"),
    [
        (501, EMBEDDINGS, "embeddings_disabled", "corral models edit tiny --set embeddings=true"),
        (501, RERANKING, "reranking_disabled", "corral models edit tiny --set reranking=true"),
        (400, POOLING, "no_pooling", "corral models edit tiny --set parameters.pooling=mean"),
        (500, IMAGE, "unsupported_input", "The model `tiny` takes no images"),
        (500, AUDIO, "unsupported_input", "The model `tiny` takes no audio"),
    ],
)
def test_known_errors_say_what_to_do(status: int, words: str, code: str, says: str) -> None:
    given, error = told(status, words)
    assert (given, error["type"], error["code"]) == (400, "invalid_request_error", code)
    assert says in error["message"]


@pytest.mark.parametrize("answer", [b'{"error":{"message":"n_predict is wrong"}}', b"<html>", b"[]", b'{"error":"no"}'])
def test_all_others_are_passed_on_as_they_came(answer: bytes) -> None:
    assert client_answer("tiny", 400, answer) == (400, ((b"content-type", b"application/json"),), answer)


def test_an_error_that_could_not_be_kept_is_told_by_its_status() -> None:
    status, _, body = client_answer("tiny", 500, b"")
    assert status == 500
    assert "gave no reason" in json.loads(body)["error"]["message"]


def test_only_errors_of_engines_we_know_are_looked_at() -> None:
    ours = [(b"server", b"llama.cpp")]
    assert [status for status in (200, 400, 404, 429, 500, 501, 503) if may_be_explained(status, ours)] == [
        400,
        500,
        501,
    ]
    assert not may_be_explained(500, [(b"server", b"uvicorn")])
