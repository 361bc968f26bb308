"""From a client's JSON and the model's definition to PredictOptions, in the contract's names."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from corral.contract import backend_pb2 as pb
from corral.inference.api_errors import ApiError
from corral.inference.backend_process import BackendProcess
from corral.inference.grpc.predict_options import chat_options, completion_options, prompts_of
from corral.inference.openai.json_body import JsonBody
from corral.inference.routes import completions

HELLO = [{"role": "user", "content": "hello"}]


def served(backend: str = "b", **definition: Any) -> BackendProcess:
    return BackendProcess("127.0.0.1:1", "m", backend, load='{"Model": "weights.gguf"}', definition=definition)


def chat(model: BackendProcess | None = None, **asked: Any) -> pb.PredictOptions:
    return chat_options(model or served(), JsonBody({"messages": HELLO, **asked}), seed=7)


def test_what_core_sends_when_nobody_says_anything() -> None:
    options = chat()
    assert options.ModelIdentity == "weights.gguf"
    assert (options.Seed, options.Tokens, options.TopK, options.Repeat) == (7, 0, 0, 0)
    assert [options.Temperature, options.TopP] == pytest.approx([0.9, 0.95])
    assert (options.TailFreeSamplingZ, options.TypicalP) == (1.0, 1.0)
    assert [options.MirostatETA, options.MirostatTAU] == pytest.approx([0.1, 5.0])
    assert (options.MMap, options.PromptCacheAll, options.UseTokenizerTemplate) == (True, True, True)
    assert (options.Prompt, options.Tools, options.ToolChoice, options.Grammar) == ("", "", "", "")
    assert options.Messages[0] == pb.Message(role="user", content="hello")


@pytest.mark.parametrize(
    ("backend", "top_k"), [("llama-cpp", 40), ("cuda12-llama-cpp", 40), ("", 40), ("llama", 40), ("vllm", 0)]
)
def test_top_k_is_of_one_family(backend: str, top_k: int) -> None:
    assert chat(served(backend)).TopK == top_k


def test_the_request_counts_before_the_definition() -> None:
    model = served(
        parameters={"temperature": 0.1, "max_tokens": 5, "seed": 3, "top_k": 9, "repeat_penalty": 1.5, "min_p": 0.25},
        stopwords=["<end>"],
        threads=4,
    )
    own = chat(model)
    assert [own.Temperature, own.Tokens, own.Seed, own.TopK] == pytest.approx([0.1, 5, 3, 9])
    assert (own.Penalty, own.MinP, own.Threads) == (1.5, 0.25, 4)
    assert list(own.StopPrompts) == ["<end>"]
    said = chat(model, temperature=0, max_tokens=6, seed=4, stop="x", top_p=0.5, max_completion_tokens=8, top_k=2)
    assert (said.Temperature, said.Tokens, said.Seed, said.TopP, said.TopK) == (0.0, 8, 4, 0.5, 2)
    assert list(said.StopPrompts) == ["<end>", "x"]


def test_a_definition_that_says_nonsense_is_not_the_clients_fault() -> None:
    model = served(parameters={"temperature": "hot", "max_tokens": "many", "seed": True}, stopwords="x", roles=[1])
    assert [chat(model).Temperature, chat(model).Tokens, chat(model).Seed] == pytest.approx([0.9, 0, 7])


def test_a_backend_that_shall_not_render_gets_one_text() -> None:
    model = served(template={"use_tokenizer_template": False}, roles={"user": "U: "}, system_prompt="be kind")
    options = chat(model)
    assert (options.UseTokenizerTemplate, list(options.Messages)) == (False, [])
    assert options.Prompt == "be kind\nU: hello"


def test_the_system_prompt_of_the_model_gives_way_to_the_clients() -> None:
    model = served(system_prompt="be kind")
    assert [message.content for message in chat(model).Messages] == ["be kind", "hello"]
    for role in ("system", "developer"):
        told = chat(model, messages=[{"role": role, "content": "be brief"}, *HELLO]).Messages
        assert [(message.role, message.content) for message in told] == [("system", "be brief"), ("user", "hello")]


def test_messages_of_every_kind() -> None:
    picture, sound = "aGVsbG8=", "d29ybGQ="
    messages = [
        {
            "role": "user",
            "name": "ann",
            "content": [
                {"type": "text", "text": "what "},
                {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}"}},
                {"type": "text", "text": "is this?"},
                {"type": "input_audio", "input_audio": {"data": sound, "format": "wav"}},
            ],
        },
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "hm",
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "42"},
    ]
    options = chat(messages=messages)
    user, assistant, tool = options.Messages
    assert (user.content, user.name) == ("what is this?", "ann")
    assert (list(options.Images), list(options.Audios)) == ([picture], [sound])
    assert assistant.reasoning_content == "hm"
    assert json.loads(assistant.tool_calls) == [
        {"index": 0, "id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
    ]
    assert (tool.role, tool.tool_call_id, tool.content) == ("tool", "c1", "42")


@pytest.mark.parametrize("url", ["/etc/passwd", "file:///etc/passwd", "http://127.0.0.1:1/x", "data:image/png,raw", ""])
def test_nothing_is_read_from_elsewhere_for_a_client(url: str) -> None:
    content = [{"type": "image_url", "image_url": {"url": url}}]
    with pytest.raises(ApiError, match="data URL"):
        chat(messages=[{"role": "user", "content": content}])


@pytest.mark.parametrize(
    "message",
    [
        "x",
        {"content": "x"},
        {"role": 1, "content": "x"},
        {"role": "user", "content": 5},
        {"role": "user", "content": ["x"]},
        {"role": "user", "content": [{"type": "hologram"}]},
        {"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "%%"}}]},
        {"role": "assistant", "tool_calls": [{"id": "x"}]},
        {"role": "assistant", "tool_calls": "x"},
    ],
)
def test_messages_that_are_none(message: Any) -> None:
    with pytest.raises(ApiError) as refused:
        chat(messages=[message])
    assert refused.value.status == 400
    assert str(refused.value.param).startswith("messages[0]")


def test_tools_of_both_ages() -> None:
    function = {"name": "f", "parameters": {}}
    new = chat(tools=[{"type": "function", "function": function}], tool_choice="auto")
    old = chat(functions=[function], function_call={"name": "f"})
    assert json.loads(new.Tools) == json.loads(old.Tools) == [{"type": "function", "function": function}]
    assert json.loads(new.ToolChoice) == "auto"
    assert json.loads(old.ToolChoice) == {"type": "function", "function": {"name": "f"}}


def test_words_for_the_template() -> None:
    model = served(reasoning={"disable": True}, chat_template_kwargs={"x": 1})
    metadata = {"user": "7", "chat_template_kwargs": '{"evil": 1}', "n": 5}
    told = dict(chat(model, metadata=metadata, reasoning_effort="low").Metadata)
    assert told == {
        "user": "7",
        "enable_thinking": "false",
        "reasoning_effort": "low",
        "chat_template_kwargs": '{"x":1}',
    }
    assert chat(model, chat_template_kwargs={"enable_thinking": True}).Metadata["enable_thinking"] == "true"


def test_the_form_of_the_answer() -> None:
    assert chat(response_format={"type": "text"}).Grammar == ""
    assert chat(response_format={"type": "json_object"}).Grammar.startswith("root ::= object")
    assert chat(grammar="root ::= [a]").Grammar == "root ::= [a]"
    assert json.loads(chat(logit_bias={"5": -100}).LogitBias) == {"5": -100}


def test_bare_completions() -> None:
    options = completion_options(served(), JsonBody({"logprobs": 2}), "go on", 7)
    assert (options.Prompt, options.UseTokenizerTemplate, options.Logprobs) == ("go on", False, 2)
    assert prompts_of(JsonBody({"prompt": ["a", "b"]})) == ["a", "b"]


async def test_more_prompts_than_are_answered_at_once_are_not_even_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared: list[str] = []

    def prepare(_served: BackendProcess, _asked: JsonBody, prompt: str, _seed: int) -> pb.PredictOptions:
        prepared.append(prompt)
        return pb.PredictOptions()

    monkeypatch.setattr(completions, "completion_options", prepare)
    caller = SimpleNamespace(process=BackendProcess("127.0.0.1:1", "m"))
    with pytest.raises(ApiError, match="at most 16"):
        await completions.complete(caller, JsonBody({"prompt": ["a"] * 10_000, "n": 16}), None)  # type: ignore[arg-type]
    assert len(prepared) < 500
