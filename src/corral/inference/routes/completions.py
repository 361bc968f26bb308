"""`/v1/chat/completions` and `/v1/completions` over Predict and PredictStream."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Sequence

from corral.contract import backend_pb2 as pb
from corral.contract.http import Headers, Responder, UpstreamFailed
from corral.inference.api_errors import JSON, Refused, bad
from corral.inference.grpc.client import Caller
from corral.inference.grpc.predict_options import chat_options, completion_options, prompts_of
from corral.inference.grpc.replies import Delta, Reading, Whole, put_together
from corral.inference.openai.completion_format import DONE, ChatShape, Shape, TextShape, usage_of
from corral.inference.openai.json_body import Asked
from corral.inference.openai.messages import offered_tools

EVENTS: Headers = ((b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"))
_MOST_CHOICES = 16


async def chat(caller: Caller, asked: Asked, responder: Responder) -> int:
    options = chat_options(caller.served, asked, _seed())
    shape = ChatShape(caller.served.model, uuid.uuid4().hex, int(time.time()))
    tools = [tool["function"]["name"] for tool in offered_tools(asked)]
    return await _answer(caller, asked, responder, shape, [options] * _choices(asked), tools=tools)


async def complete(caller: Caller, asked: Asked, responder: Responder) -> int:
    if asked.text("suffix"):
        raise bad("suffix", "suffix is not served by gRPC backends.")
    choices = _choices(asked)
    prompts = [prompt for prompt in prompts_of(asked)[: _MOST_CHOICES + 1] for _ in range(choices)]
    shape = TextShape(caller.served.model, uuid.uuid4().hex, int(time.time()))
    options = [completion_options(caller.served, asked, prompt, _seed()) for prompt in prompts]
    echoed = prompts if asked.flag("echo") else [""] * len(prompts)
    return await _answer(caller, asked, responder, shape, options, echoed=echoed, parsed=False)


async def _answer(
    caller: Caller,
    asked: Asked,
    responder: Responder,
    shape: Shape,
    options: Sequence[pb.PredictOptions],
    *,
    tools: Sequence[str] = (),
    echoed: Sequence[str] = ("",),
    parsed: bool = True,
) -> int:
    if len(options) > _MOST_CHOICES:
        raise bad("n", f"at most {_MOST_CHOICES} choices are made at once.")
    if not asked.flag("stream"):
        readings = [Reading(tools, parsed=parsed) for _ in options]
        answered = await _all(caller, list(zip(options, readings, strict=True)))
        return await _send_whole(responder, shape, answered, echoed)
    if len(options) > 1:
        raise bad("n", "a stream has one choice and one prompt.")
    usage_wanted = asked.mapping("stream_options").get("include_usage") is True
    reading = Reading(tools, parsed=parsed)
    async with _replies(caller, options[0]) as replies:
        events = _events(replies, reading, shape, options[0].Tokens, usage_wanted, echoed[0])
        await responder.stream(200, EVENTS, events)
    return 200


def _choices(asked: Asked) -> int:
    wanted = asked.whole("n")
    if wanted is None:
        return 1
    if wanted < 1:
        raise bad("n", "n must be at least 1.")
    return min(wanted, _MOST_CHOICES + 1)  # more is refused where prompts are counted, too


def _seed() -> int:
    return random.getrandbits(31)


class _Answered:
    def __init__(self, answer: Whole, reason: str, prompt_tokens: int, tokens: int) -> None:
        self.answer = answer
        self.reason = reason
        self.prompt_tokens = prompt_tokens
        self.tokens = tokens


async def _all(caller: Caller, asking: Sequence[tuple[pb.PredictOptions, Reading]]) -> list[_Answered]:
    if len(asking) == 1:
        return [await _whole(caller, *asking[0])]
    async with asyncio.TaskGroup() as tasks:
        answering = [tasks.create_task(_whole(caller, options, reading)) for options, reading in asking]
    return [task.result() for task in answering]


async def _whole(caller: Caller, options: pb.PredictOptions, reading: Reading) -> _Answered:
    reply = await caller.ask("Predict", options, pb.Reply)
    answer = put_together([reading.feed(reply), reading.finish()])
    return _Answered(answer, _reason(reading, options.Tokens, reply.tokens), reading.prompt_tokens, reply.tokens)


async def _send_whole(responder: Responder, shape: Shape, answered: Sequence[_Answered], echoed: Sequence[str]) -> int:
    prompts = echoed if len(echoed) == len(answered) else [""] * len(answered)
    choices = [
        (each.answer._replace(content=prompt + each.answer.content), each.reason)
        for each, prompt in zip(answered, prompts, strict=True)
    ]
    usage = usage_of(sum(each.prompt_tokens for each in answered), sum(each.tokens for each in answered))
    await responder.send(200, (JSON,), shape.whole(choices, usage))
    return 200


@contextlib.asynccontextmanager
async def _replies(caller: Caller, options: pb.PredictOptions) -> AsyncIterator[AsyncIterator[pb.Reply]]:
    """As a stream; from a backend that has none, the whole answer at once."""
    async with contextlib.AsyncExitStack() as stack:
        try:
            replies = await stack.enter_async_context(caller.stream("PredictStream", options))
        except Refused as refused:
            if refused.status != 501:
                raise
            replies = _single(await caller.ask("Predict", options, pb.Reply))
        yield replies


async def _single(reply: pb.Reply) -> AsyncIterator[pb.Reply]:
    yield reply


async def _events(
    replies: AsyncIterator[pb.Reply], reading: Reading, shape: Shape, most: int, usage_wanted: bool, echoed: str
) -> AsyncGenerator[bytes, None]:
    """What fails from here on is an event of its own: the status is on its way already."""
    yield shape.first()
    if echoed:
        yield shape.piece(Delta(echoed))
    try:
        async for reply in replies:
            if delta := reading.feed(reply):
                yield shape.piece(delta)
    except Refused as refused:
        yield b"data: %b\n\n" % refused.body
        return
    except UpstreamFailed as failure:
        broken = Refused(502, f"The backend broke off in mid-answer: {failure}", code="upstream_failed")
        yield b"data: %b\n\n" % broken.body
        return
    if delta := reading.finish():
        yield shape.piece(delta)
    usage = usage_of(reading.prompt_tokens, reading.tokens)
    # Told with the last choice even to who did not ask: a gateway that counts for limits reads it there.
    yield shape.last(_reason(reading, most, reading.tokens), None if usage_wanted else usage)
    if usage_wanted:
        yield shape.usage(usage)
    yield DONE


def _reason(reading: Reading, most: int, tokens: int) -> str:
    """gRPC has no word for it."""
    if reading.called:
        return "tool_calls"
    return "length" if most and tokens >= most else "stop"
