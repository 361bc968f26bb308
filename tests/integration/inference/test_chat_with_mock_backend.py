"""Chat and completions of a gRPC process, plain and streamed, through the worker's ingress by OpenAI's own client."""

from __future__ import annotations

from typing import Any

from tests.integration.inference.conftest import Serve

HELLO: Any = [{"role": "user", "content": "hello there"}]


async def test_a_chat(serve: Serve) -> None:
    mock = await serve()
    answer = await mock.client.chat.completions.create(model="m", messages=HELLO)
    assert (answer.object, answer.model) == ("chat.completion", "m")
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", "mock 1: hello there")
    assert choice.finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.model_dump(exclude_none=True) == {
        "prompt_tokens": 2,
        "completion_tokens": 3,
        "total_tokens": 5,
    }


async def test_a_streamed_chat(serve: Serve) -> None:
    mock = await serve()
    stream = await mock.client.chat.completions.create(
        model="m", messages=HELLO, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    said = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices]
    assert said == ["", "mock 1:", " hello", " there", None]
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == 5


async def test_completions(serve: Serve) -> None:
    mock = await serve()
    answer = await mock.client.completions.create(model="m", prompt="one two", max_tokens=2)
    assert (answer.object, answer.choices[0].text, answer.choices[0].finish_reason) == (
        "text_completion",
        "mock 1: one",
        "length",
    )
    stream = await mock.client.completions.create(model="m", prompt="one two", stream=True, echo=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == "one twomock 1: one two"
