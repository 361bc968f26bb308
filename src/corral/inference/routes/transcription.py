"""`/v1/audio/transcriptions`, `/v1/audio/translations` and `/v1/audio/diarization`: a file in, text out."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack

from corral.contract import backend_pb2 as pb
from corral.contract.codec import encode
from corral.contract.http import Request, Responder, UpstreamFailed
from corral.inference.api_errors import JSON, Refused, bad
from corral.inference.grpc.client import Caller
from corral.inference.openai.completion_format import event
from corral.inference.openai.forms import Form, read_form
from corral.inference.openai.transcript_format import FORMATS, text_of
from corral.inference.request_files import Files
from corral.inference.routes.completions import EVENTS

_GRANULARITIES = ("segment", "word")


async def transcribe(caller: Caller, request: Request, responder: Responder, files: Files) -> int:
    return await _transcribe(caller, request, responder, files, "transcribe")


async def translate(caller: Caller, request: Request, responder: Responder, files: Files) -> int:
    return await _transcribe(caller, request, responder, files, "translate")


async def _transcribe(caller: Caller, request: Request, responder: Responder, files: Files, task: str) -> int:
    async with files.open() as folder:
        form = await read_form(request, folder)
        wanted = form.text("response_format", "json")
        if wanted not in FORMATS:
            raise bad("response_format", f"response_format must be one of {', '.join(FORMATS)}.")
        asked = _asked(caller, form, task)
        if form.flag("stream"):
            return await _stream(caller, asked, responder)
        result = await caller.ask("AudioTranscription", asked, pb.TranscriptResult)
        kind, body = FORMATS[wanted](result, task)
        await responder.send(200, ((b"content-type", kind),), body)
        return 200


def _asked(caller: Caller, form: Form, task: str) -> pb.TranscriptRequest:
    granularities = form.texts("timestamp_granularities")
    if unknown := [each for each in granularities if each not in _GRANULARITIES]:
        raise bad(
            "timestamp_granularities", f"timestamp_granularities: {unknown[0][:40]!r} is neither segment nor word."
        )
    served = caller.served
    threads = served.setting("threads")
    language = served.setting("parameters", "language")
    return pb.TranscriptRequest(
        dst=form.file,
        language=form.text("language") or (language if isinstance(language, str) else ""),
        threads=threads if isinstance(threads, int) and 0 < threads < 1024 else 0,
        translate=task == "translate" or form.flag("translate"),
        diarize=form.flag("diarize") or form.text("response_format") == "diarized_json",
        prompt=form.text("prompt"),
        temperature=form.number("temperature"),
        timestamp_granularities=granularities,
        stream=form.flag("stream"),
        ModelIdentity=served.identity,
    )


async def _stream(caller: Caller, asked: pb.TranscriptRequest, responder: Responder) -> int:
    async with AsyncExitStack() as stack:
        try:
            replies = await stack.enter_async_context(caller.stream("AudioTranscriptionStream", asked))
        except Refused as refused:
            if refused.status != 501:
                raise
            asked.stream = False
            replies = _single(await caller.ask("AudioTranscription", asked, pb.TranscriptResult))
        await responder.stream(200, EVENTS, _events(replies))
    return 200


async def _single(result: pb.TranscriptResult) -> AsyncIterator[pb.TranscriptStreamResponse]:
    """From a backend that does not stream: all of it at once."""
    yield pb.TranscriptStreamResponse(delta=text_of(result))
    yield pb.TranscriptStreamResponse(final_result=result)


async def _events(replies: AsyncIterator[pb.TranscriptStreamResponse]) -> AsyncGenerator[bytes, None]:
    said: list[str] = []
    whole = ""
    try:
        async for reply in replies:
            if reply.delta:
                said.append(reply.delta)
                yield event({"type": "transcript.text.delta", "delta": reply.delta})
            if reply.HasField("final_result"):
                whole = text_of(reply.final_result)
    except (Refused, UpstreamFailed) as failure:
        broken = failure if isinstance(failure, Refused) else Refused(502, str(failure), code="upstream_failed")
        yield b"data: %b\n\n" % broken.body
        return
    yield event({"type": "transcript.text.done", "text": whole or "".join(said)})


async def diarize(caller: Caller, request: Request, responder: Responder, files: Files) -> int:
    async with files.open() as folder:
        form = await read_form(request, folder)
        asked = pb.DiarizeRequest(
            dst=form.file,
            language=form.text("language"),
            num_speakers=form.whole("num_speakers"),
            min_speakers=form.whole("min_speakers"),
            max_speakers=form.whole("max_speakers"),
            clustering_threshold=form.number("clustering_threshold"),
            min_duration_on=form.number("min_duration_on"),
            min_duration_off=form.number("min_duration_off"),
            include_text=form.flag("include_text"),
            ModelIdentity=caller.served.identity,
        )
        result = await caller.ask("Diarize", asked, pb.DiarizeResponse)
    segments = [
        {"id": each.id, "start": each.start, "end": each.end, "speaker": each.speaker}
        | ({"text": each.text} if each.text else {})
        for each in result.segments
    ]
    answer = {
        "task": "diarize",
        "duration": result.duration,
        "language": result.language,
        "num_speakers": result.num_speakers or len({each.speaker for each in result.segments}),
        "segments": segments,
    }
    await responder.send(200, (JSON,), encode(answer))
    return 200
