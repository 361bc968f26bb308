"""What a client may have meant: found among the names it may use, and quickly among many."""

from __future__ import annotations

import time

from corral.gateway.routing.suggestions import ModelSuggestions
from corral.gateway.view.fleet import Client


def client(*models: str) -> Client:
    return Client("k", "inference", True, True, False, float("inf"), frozenset(models) if models else None, b"")


def test_what_may_have_been_meant() -> None:
    names = ModelSuggestions(["smollm2-135m", "smollm2-360m", "qwen", "llama-3"])
    assert names.find("smolm2-135m", client()) == ["smollm2-135m", "smollm2-360m"]
    assert names.find("lama-3", client()) == ["llama-3"]
    assert names.find("gpt-4o", client()) == []
    assert names.find("", client()) == []
    assert names.find("smolm2-135m", client("qwen", "smollm2-360m")) == ["smollm2-360m"], "others are not its business"
    assert ModelSuggestions().find("x", client()) == []


def test_many_names_that_look_alike_keep_nobody_waiting() -> None:
    names = ModelSuggestions(f"huggingface/some-model-{number:04}-instruct-q4_k_m" for number in range(1000))
    began = time.process_time()
    for number in range(20):
        assert names.find(f"huggingface/some-model-{number:04}-instruct-q4_k_s", client())
    for _ in range(10_000):
        names.find("huggingface/some-model-0000-instruct-q4_k_s", client())
    assert time.process_time() - began < 1.5, "each took an eighth of a second once"
