"""What backends send that the mock does not, and what a client makes of it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import openai
import pytest

from corral.contract import backend_pb2 as pb
from tests.integration.inference.scripted_backend import Abort, Scripted, scripted

HELLO: Any = [{"role": "user", "content": "hello"}]
TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
CHAT = "/v1/chat/completions"


@pytest.fixture
async def backend(tmp_path: Path) -> AsyncIterator[Scripted]:
    async with scripted(tmp_path) as opened:
        yield opened


def said(text: str = "", **more: Any) -> pb.Reply:
    return pb.Reply(message=text.encode(), **more)


def delta(content: str = "", *calls: pb.ToolCallDelta, text: str = "", reasoning: str = "", **more: Any) -> pb.Reply:
    deltas = [pb.ChatDelta(content=content, reasoning_content=reasoning, tool_calls=calls)]
    return pb.Reply(message=text.encode(), chat_deltas=deltas, **more)


def call(index: int = 0, arguments: str = "", name: str = "", id: str = "") -> pb.ToolCallDelta:
    return pb.ToolCallDelta(index=index, id=id, name=name, arguments=arguments)


async def told(backend: Scripted, *replies: pb.Reply, **more: Any) -> list[dict[str, Any]]:
    """The deltas a streaming client sees, and why it ended."""
    backend.script.says["PredictStream"] = list(replies)
    events = await backend.events(CHAT, {"model": "m", "messages": HELLO, "stream": True, **more})
    assert events[-1] == "[DONE]"
    choices = [event["choices"][0] for event in events[1:-1] if event["choices"]]
    return [choice["delta"] | ({"reason": end} if (end := choice["finish_reason"]) else {}) for choice in choices]


async def test_characters_that_come_in_pieces(backend: Scripted) -> None:
    whole = "Ünïcødé 🐴".encode()
    replies = [pb.Reply(message=whole[at : at + 1]) for at in range(len(whole))]
    deltas = await told(backend, *replies)
    assert "".join(each.get("content", "") for each in deltas) == "Ünïcødé 🐴"
    assert (await told(backend, pb.Reply(message=b"cut \xf0\x9f")))[-2] == {"content": "�"}


async def test_counts_at_the_end_and_text_beside_deltas(backend: Scripted) -> None:
    """mlx: text with one delta each and no counts, then an empty one with counts."""
    replies = (delta("Hel", text="Hel"), delta("lo", text="lo"), said(tokens=2, prompt_tokens=7))
    assert await told(backend, *replies) == [{"content": "Hel"}, {"content": "lo"}, {"reason": "stop"}]
    events = await backend.events(CHAT, {"messages": HELLO, "stream": True})
    assert events[-2]["usage"] == {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9}


async def test_no_counts_at_all(backend: Scripted) -> None:
    """transformers: plain text, some of it empty."""
    assert await told(backend, said(""), said("a"), said("b"), max_tokens=2) == [
        {"content": "a"},
        {"content": "b"},
        {"reason": "length"},
    ]


async def test_text_first_and_all_of_it_again_as_deltas(backend: Scripted) -> None:
    assert await told(backend, said("a"), said("b"), delta("ab")) == [
        {"content": "a"},
        {"content": "b"},
        {"reason": "stop"},
    ]


async def test_thoughts(backend: Scripted) -> None:
    assert await told(backend, delta(reasoning="hm", text="<think>hm"), delta("4", text="4")) == [
        {"reasoning_content": "hm"},
        {"content": "4"},
        {"reason": "stop"},
    ]
    backend.script.says["Predict"] = delta("4", reasoning="hm")
    answer = await backend.client.chat.completions.create(model="m", messages=HELLO)
    assert answer.choices[0].message.model_dump(exclude_none=True) == {
        "role": "assistant",
        "content": "4",
        "reasoning_content": "hm",
    }


async def test_tool_calls_in_pieces(backend: Scripted) -> None:
    replies = (
        delta("", call(0, name="weather", id="c1"), text="<tool"),
        delta("", call(0, '{"city":'), text="_call>"),
        delta("", call(0, '"Rome"}')),
        delta("", call(1, "{}", "weather", "c2")),
    )
    backend.script.says["PredictStream"] = list(replies)
    stream = await backend.client.chat.completions.create(model="m", messages=HELLO, tools=TOOLS, stream=True)
    seen: dict[int, list[str]] = {}
    names = []
    reasons = []
    async for chunk in stream:
        reasons.append(chunk.choices[0].finish_reason)
        for part in chunk.choices[0].delta.tool_calls or ():
            assert part.function is not None
            seen.setdefault(part.index, []).append(part.function.arguments or "")
            if part.id:
                names.append((part.id, part.type, part.function.name))
    assert {index: "".join(parts) for index, parts in seen.items()} == {0: '{"city":"Rome"}', 1: "{}"}
    assert names == [("c1", "function", "weather"), ("c2", "function", "weather")]
    assert reasons[-1] == "tool_calls"


async def test_a_whole_answer_with_calls(backend: Scripted) -> None:
    backend.script.says["Predict"] = delta("", call(0, '{"city":"Rome"}', "weather"), tokens=9)
    answer = await backend.client.chat.completions.create(
        model="m", messages=HELLO, tools=TOOLS, tool_choice={"type": "function", "function": {"name": "weather"}}
    )
    (choice,) = answer.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    assert choice.message.tool_calls is not None
    (made,) = choice.message.tool_calls
    assert made.type == "function"
    assert made.id.startswith("call_")
    assert (made.function.name, made.function.arguments) == ("weather", '{"city":"Rome"}')
    asked = backend.script.last("Predict")
    assert json.loads(asked.Tools) == TOOLS
    assert json.loads(asked.ToolChoice) == {"type": "function", "function": {"name": "weather"}}


@pytest.mark.parametrize(
    "pieces",
    [
        ['{"name": "weather", ', '"arguments": {"city":"Rome"}}'],
        ["<tool_", 'call>{"name": "weather", "arguments": {"city":"Rome"}}</tool', "_call>"],
        ['[{"function": {"name": "weather", "arguments": "{\\"city\\":\\"Rome\\"}"}}]'],
    ],
)
async def test_calls_that_come_as_text(backend: Scripted, pieces: list[str]) -> None:
    deltas = await told(backend, *(said(piece) for piece in pieces), tools=TOOLS)
    assert deltas[-1] == {"reason": "tool_calls"}
    (made,) = deltas[0]["tool_calls"]
    assert made["function"] == {"name": "weather", "arguments": '{"city":"Rome"}'}


async def test_a_backend_that_is_slow_to_accept_a_connection_is_waited_for(tmp_path: Path) -> None:
    """An engine that holds every core: each request after a start was refused with 502 until a connection was quick."""
    async with scripted(tmp_path, accepts_after_s=0.5) as backend:
        deltas = await told(backend, said("late"))
    assert deltas == [{"content": "late"}, {"reason": "stop"}]


async def test_text_that_only_looks_like_a_call(backend: Scripted) -> None:
    assert await told(backend, said('{"name": '), said('"other"}'), tools=TOOLS) == [
        {"content": '{"name": "other"}'},
        {"reason": "stop"},
    ]
    # What cannot become a call is not held back.
    assert await told(backend, said("It"), said(" rains"), tools=TOOLS) == [
        {"content": "It"},
        {"content": " rains"},
        {"reason": "stop"},
    ]


async def test_logprobs(backend: Scripted) -> None:
    content = [{"id": 5, "token": "Hi", "bytes": [72, 105], "logprob": -0.5, "top_logprobs": []}]
    reply = said("Hi", logprobs=json.dumps({"content": content}).encode())
    backend.script.says |= {"Predict": reply, "PredictStream": [reply]}
    answer = await backend.client.chat.completions.create(model="m", messages=HELLO, logprobs=True, top_logprobs=3)
    assert (backend.script.last("Predict").Logprobs, backend.script.last("Predict").TopLogprobs) == (3, 3)
    told = answer.choices[0].logprobs
    assert told is not None
    assert told.content is not None
    assert (told.content[0].token, told.content[0].logprob) == ("Hi", -0.5)
    events = await backend.events(CHAT, {"messages": HELLO, "stream": True, "logprobs": True})
    assert events[1]["choices"][0]["logprobs"]["content"] == content
    legacy = await backend.client.completions.create(model="m", prompt="x", logprobs=0)
    assert legacy.choices[0].logprobs is not None
    assert legacy.choices[0].logprobs.model_dump() == {
        "tokens": ["Hi"],
        "token_logprobs": [-0.5],
        "top_logprobs": [{}],
        "text_offset": [0],
    }
    assert backend.script.last("Predict").Logprobs == 1


async def test_a_backend_that_does_not_stream(backend: Scripted) -> None:
    backend.script.says["Predict"] = said("all at once", tokens=3)
    events = await backend.events(CHAT, {"messages": HELLO, "stream": True})
    assert [event["choices"][0]["delta"].get("content") for event in events[:-1]] == ["", "all at once", None]


async def test_several_choices(backend: Scripted) -> None:
    backend.script.says["Predict"] = said("x", tokens=1, prompt_tokens=2)
    answer = await backend.client.chat.completions.create(model="m", messages=HELLO, n=3)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3
    texts = await backend.client.completions.create(model="m", prompt=["a", "b"], echo=True)
    assert [choice.text for choice in texts.choices] == ["ax", "bx"]
    backend.script.says["Predict"] = Abort(grpc.StatusCode.INVALID_ARGUMENT, "too long")
    with pytest.raises(openai.BadRequestError, match="too long"):
        await backend.client.chat.completions.create(model="m", messages=HELLO, n=3)


@pytest.mark.parametrize(
    ("code", "words", "status", "kind", "shown"),
    [
        ("NOT_FOUND", "model identity mismatch: loaded 'a', requested 'b'", 410, "gone", "serves another model"),
        ("NOT_FOUND", "no such voice", 404, "not_found", "no such voice"),
        ("UNIMPLEMENTED", "", 501, "not_implemented", "The backend b does not implement Predict: use"),
        ("UNKNOWN", "rpc error: unimplemented", 501, "not_implemented", "does not implement Predict"),
        ("RESOURCE_EXHAUSTED", "all slots are taken", 503, "busy", "all slots are taken"),
        ("INVALID_ARGUMENT", "too many tokens", 400, None, "too many tokens"),
        ("UNKNOWN", "TypeError: boom", 500, "backend_failed", "Predict: TypeError: boom"),
        ("UNAUTHENTICATED", "invalid token", 502, "backend_failed", "does not accept this worker"),
        ("FAILED_PRECONDITION", "not now", 503, "model_not_loaded", "no model loaded"),
        ("UNKNOWN", "Model not loaded", 503, "model_not_loaded", "no model loaded"),
    ],
)
async def test_errors_in_openais_envelope(
    backend: Scripted, code: str, words: str, status: int, kind: str | None, shown: str
) -> None:
    backend.script.says["LoadModel"] = pb.Result(success=True)
    abort = Abort(grpc.StatusCode[code], words)
    backend.script.says |= {"Predict": abort, "PredictStream": [abort]}
    found, answer = await backend.ask(CHAT, {"messages": HELLO})
    assert (found, answer["error"]["code"]) == (status, kind)
    assert answer["error"].keys() == {"message", "type", "param", "code"}
    assert answer["error"]["type"] == ("server_error" if status >= 500 else "invalid_request_error")
    assert shown in answer["error"]["message"]
    if status != 501:  # a stream falls back then, and says the same in the end
        assert (await backend.ask(CHAT, {"messages": HELLO, "stream": True}))[0] == status


async def test_a_model_that_was_freed_is_loaded_again_for_all_who_wait(backend: Scripted) -> None:
    loaded = False

    def predict() -> Any:
        return said("back") if loaded else Abort(grpc.StatusCode.FAILED_PRECONDITION, "model not loaded")

    def load() -> pb.Result:
        nonlocal loaded
        loaded = True
        return pb.Result(success=True)

    backend.script.says |= {"Predict": predict, "LoadModel": load}
    answer = await backend.client.chat.completions.create(model="m", messages=HELLO, n=3)
    assert [choice.message.content for choice in answer.choices] == ["back"] * 3
    assert [request.Model for name, request in backend.script.heard if name == "LoadModel"] == ["weights"]


async def test_an_error_in_mid_stream_is_an_event(backend: Scripted) -> None:
    backend.script.says["PredictStream"] = [said("a"), Abort(grpc.StatusCode.INTERNAL, "out of memory")]
    stream = await backend.client.chat.completions.create(model="m", messages=HELLO, stream=True)
    heard = []

    async def listen() -> None:
        async for chunk in stream:
            heard.append(chunk.choices[0].delta.content)

    with pytest.raises(openai.APIError, match="out of memory"):
        await listen()
    assert heard == ["", "a"]
    events = await backend.events(CHAT, {"messages": HELLO, "stream": True})
    assert events[-1]["error"]["code"] == "backend_failed"


async def test_vectors_of_all_forms(backend: Scripted, tmp_path: Path) -> None:
    backend.script.says["Embedding"] = pb.EmbeddingResult(embeddings=[1, 2, 3, 4], prompt_tokens=3)
    answer = await backend.client.embeddings.create(model="m", input=["a", "b"])  # asks for base64 by itself
    assert [row.embedding for row in answer.data] == [[1, 2, 3, 4]] * 2
    assert answer.usage.prompt_tokens == 6
    plain = await backend.client.embeddings.create(model="m", input=[5, 6], encoding_format="float")
    assert plain.data[0].embedding == [1, 2, 3, 4]
    assert list(backend.script.last("Embedding").EmbeddingTokens) == [5, 6]
    assert backend.script.last("Embedding").ModelIdentity == "weights"
    with pytest.raises(openai.BadRequestError, match="4 dimensions"):
        await backend.client.embeddings.create(model="m", input="a", dimensions=2)
    per_token = pb.EmbeddingResult(embeddings=[1, 2, 3, 4], tokens=2, dim=2, layout=pb.EMBEDDING_LAYOUT_PER_TOKEN)
    for pooling, vector in (("", [2, 3]), ("last", [3, 4]), ("decayed_mean", [7 / 3, 10 / 3])):
        parameters = {"pooling": pooling, "pooling_half_life_tokens": 1}
        async with scripted(tmp_path, definition={"parameters": parameters}) as pooled:
            pooled.script.says["Embedding"] = per_token
            (row,) = (await pooled.client.embeddings.create(model="m", input="a", encoding_format="float")).data
            assert row.embedding == pytest.approx(vector)


@pytest.mark.parametrize(
    ("path", "rpc"),
    [
        ("/v1/score", "its RPC, Score, is not translated here"),
        ("/v1/responses", "there is no RPC for it"),
        ("/v1/rerank", "does not implement Rerank"),
        ("/v1/tokenize", "does not implement TokenizeString"),
    ],
)
async def test_what_is_not_there_is_named(backend: Scripted, path: str, rpc: str) -> None:
    status, answer = await backend.ask(path, {"query": "q", "documents": ["d"], "content": "c"})
    assert status == 501
    assert rpc in answer["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {}, "messages"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": [{"content": "x"}]}, "messages[0].role"),
        (CHAT, {"messages": HELLO, "temperature": "hot"}, "temperature"),
        (CHAT, {"messages": HELLO, "max_tokens": -1}, "max_tokens"),
        (CHAT, {"messages": HELLO, "stop": [1]}, "stop"),
        (CHAT, {"messages": HELLO, "n": 0}, "n"),
        (CHAT, {"messages": HELLO, "n": 2, "stream": True}, "n"),
        (CHAT, {"messages": HELLO, "tools": [{}]}, "tools"),
        (CHAT, {"messages": HELLO, "top_logprobs": 3}, "top_logprobs"),
        (CHAT, {"messages": HELLO, "response_format": {"type": "json_schema"}}, "response_format"),
        ("/v1/completions", {"prompt": [1, 2]}, "prompt"),
        ("/v1/completions", {}, "prompt"),
        ("/v1/completions", {"prompt": "x", "suffix": "y"}, "suffix"),
        ("/v1/embeddings", {"input": []}, "input"),
        ("/v1/embeddings", {"input": "x", "encoding_format": "hex"}, "encoding_format"),
        ("/v1/rerank", {"query": "x"}, "documents"),
        ("/v1/audio/speech", {"input": "x", "voice": "/etc/passwd"}, "voice"),
        ("/v1/audio/speech", {"voice": "x"}, "input"),
        ("/v1/audio/speech", {"input": "x", "params": {"clip": "/etc/passwd"}}, "params"),
        ("/v1/audio/speech", {"input": "x", "params": {"clip": []}}, "params"),
        ("/v1/detokenize", {"tokens": ["x"]}, "tokens"),
        ("/v1/vad", {"audio": "x"}, "audio"),
    ],
)
async def test_what_a_client_can_mend_is_named(backend: Scripted, path: str, body: Any, param: str) -> None:
    status, answer = await backend.ask(path, body)
    assert (status, answer["error"]["param"]) == (400, param)
    assert backend.script.heard == []


async def test_bodies_that_are_none(backend: Scripted) -> None:
    async with aiohttp.ClientSession() as session:
        for body in (b"", b"{", b"[]", b'"x"', b"\xff"):
            async with session.post(backend.url + CHAT, data=body) as answer:
                assert answer.status == 400
        async with session.get(backend.url + CHAT) as answer:
            assert answer.status == 405
        async with session.post(backend.url + "/v1/audio/transcriptions", json={"model": "m"}) as answer:
            assert answer.status == 415
