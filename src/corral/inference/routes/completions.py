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
from corral.inference.api_errors import JSON, ApiError, invalid_field
from corral.inference.grpc.client import BackendClient
from corral.inference.grpc.predict_options import chat_options, completion_options, prompts_of
from corral.inference.grpc.replies import CompleteReply, Delta, ReplyReader, join_deltas
from corral.inference.openai.completion_format import DONE, ChatFormat, CompletionFormat, TextFormat, usage_of
from corral.inference.openai.json_body import JsonBody
from corral.inference.openai.messages import offered_tools

EVENTS: Headers = ((b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"))
_MAX_CHOICES = 16


async def chat(client: BackendClient, body: JsonBody, responder: Responder) -> int:
    options = chat_options(client.process, body, _seed())
    shape = ChatFormat(client.process.model, uuid.uuid4().hex, int(time.time()))
    tools = [tool["function"]["name"] for tool in offered_tools(body)]
    return await _answer(client, body, responder, shape, [options] * _choices(body), tools=tools)


async def complete(client: BackendClient, body: JsonBody, responder: Responder) -> int:
    if body.text("suffix"):
        raise invalid_field("suffix", "suffix is not served by gRPC backends.")
    choices = _choices(body)
    prompts = [prompt for prompt in prompts_of(body)[: _MAX_CHOICES + 1] for _ in range(choices)]
    shape = TextFormat(client.process.model, uuid.uuid4().hex, int(time.time()))
    options = [completion_options(client.process, body, prompt, _seed()) for prompt in prompts]
    echoed = prompts if body.flag("echo") else [""] * len(prompts)
    return await _answer(client, body, responder, shape, options, echoed=echoed, parsed=False)


async def _answer(
    client: BackendClient,
    body: JsonBody,
    responder: Responder,
    shape: CompletionFormat,
    options: Sequence[pb.PredictOptions],
    *,
    tools: Sequence[str] = (),
    echoed: Sequence[str] = ("",),
    parsed: bool = True,
) -> int:
    if len(options) > _MAX_CHOICES:
        raise invalid_field("n", f"at most {_MAX_CHOICES} choices are made at once.")
    if not body.flag("stream"):
        readings = [ReplyReader(tools, parsed=parsed) for _ in options]
        answered = await _all(client, list(zip(options, readings, strict=True)))
        return await _send_whole(responder, shape, answered, echoed)
    if len(options) > 1:
        raise invalid_field("n", "a stream has one choice and one prompt.")
    usage_wanted = body.mapping("stream_options").get("include_usage") is True
    reading = ReplyReader(tools, parsed=parsed)
    async with _replies(client, options[0]) as replies:
        events = _events(replies, reading, shape, options[0].Tokens, usage_wanted, echoed[0])
        await responder.stream(200, EVENTS, events)
    return 200


def _choices(body: JsonBody) -> int:
    wanted = body.whole("n")
    if wanted is None:
        return 1
    if wanted < 1:
        raise invalid_field("n", "n must be at least 1.")
    return min(wanted, _MAX_CHOICES + 1)  # a larger number is refused together with the prompts


def _seed() -> int:
    return random.getrandbits(31)


class _Answered:
    def __init__(self, answer: CompleteReply, reason: str, prompt_tokens: int, tokens: int) -> None:
        self.answer = answer
        self.reason = reason
        self.prompt_tokens = prompt_tokens
        self.tokens = tokens


async def _all(client: BackendClient, requests: Sequence[tuple[pb.PredictOptions, ReplyReader]]) -> list[_Answered]:
    if len(requests) == 1:
        return [await _whole(client, *requests[0])]
    async with asyncio.TaskGroup() as tasks:
        answering = [tasks.create_task(_whole(client, options, reading)) for options, reading in requests]
    return [task.result() for task in answering]


async def _whole(client: BackendClient, options: pb.PredictOptions, reading: ReplyReader) -> _Answered:
    reply = await client.call("Predict", options, pb.Reply)
    answer = join_deltas([reading.feed(reply), reading.finish()])
    return _Answered(answer, _reason(reading, options.Tokens, reply.tokens), reading.prompt_tokens, reply.tokens)


async def _send_whole(
    responder: Responder, shape: CompletionFormat, answered: Sequence[_Answered], echoed: Sequence[str]
) -> int:
    prompts = echoed if len(echoed) == len(answered) else [""] * len(answered)
    choices = [
        (each.answer._replace(content=prompt + each.answer.content), each.reason)
        for each, prompt in zip(answered, prompts, strict=True)
    ]
    usage = usage_of(sum(each.prompt_tokens for each in answered), sum(each.tokens for each in answered))
    await responder.send(200, (JSON,), shape.whole(choices, usage))
    return 200


@contextlib.asynccontextmanager
async def _replies(client: BackendClient, options: pb.PredictOptions) -> AsyncIterator[AsyncIterator[pb.Reply]]:
    """A stream of replies; from a backend without streams, one reply with the whole answer."""
    async with contextlib.AsyncExitStack() as stack:
        replies = await client.enter_stream(stack, "PredictStream", options)
        if replies is None:
            replies = _single(await client.call("Predict", options, pb.Reply))
        yield replies


async def _single(reply: pb.Reply) -> AsyncIterator[pb.Reply]:
    yield reply


async def _events(
    replies: AsyncIterator[pb.Reply],
    reading: ReplyReader,
    shape: CompletionFormat,
    max_tokens: int,
    usage_wanted: bool,
    echoed: str,
) -> AsyncGenerator[bytes, None]:
    """Errors become events, because the status has been sent already."""
    yield shape.first()
    if echoed:
        yield shape.piece(Delta(echoed))
    try:
        async for reply in replies:
            if delta := reading.feed(reply):
                yield shape.piece(delta)
    except ApiError as refused:
        yield b"data: %b\n\n" % refused.body
        return
    except UpstreamFailed as failure:
        broken = ApiError(502, f"The backend broke the connection during the answer: {failure}", code="upstream_failed")
        yield b"data: %b\n\n" % broken.body
        return
    if delta := reading.finish():
        yield shape.piece(delta)
    usage = usage_of(reading.prompt_tokens, reading.tokens)
    # Sent with the last choice even if the client did not request it: the gateway reads it for its limits.
    yield shape.last(_reason(reading, max_tokens, reading.tokens), None if usage_wanted else usage)
    if usage_wanted:
        yield shape.usage(usage)
    yield DONE


def _reason(reading: ReplyReader, max_tokens: int, tokens: int) -> str:
    """The finish reason, which gRPC replies do not contain."""
    if reading.called:
        return "tool_calls"
    return "length" if max_tokens and tokens >= max_tokens else "stop"
