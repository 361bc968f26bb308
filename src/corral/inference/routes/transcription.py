"""`/v1/audio/transcriptions`, `/v1/audio/translations` and `/v1/audio/diarization`: from an audio file to text."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack

from corral.contract import backend_pb2 as pb
from corral.contract.codec import encode
from corral.contract.http import Request, Responder, UpstreamFailed
from corral.inference.api_errors import JSON, ApiError, invalid_field
from corral.inference.grpc.client import BackendClient
from corral.inference.openai.completion_format import event
from corral.inference.openai.forms import FormBody, read_form
from corral.inference.openai.media_body import MediaBody
from corral.inference.openai.transcript_format import FORMATS, text_of
from corral.inference.request_files import RequestFiles
from corral.inference.routes.completions import EVENTS

_GRANULARITIES = ("segment", "word")


async def transcribe(client: BackendClient, request: Request, responder: Responder, files: RequestFiles) -> int:
    return await _transcribe(client, request, responder, files, "transcribe")


async def translate(client: BackendClient, request: Request, responder: Responder, files: RequestFiles) -> int:
    return await _transcribe(client, request, responder, files, "translate")


async def _transcribe(
    client: BackendClient, request: Request, responder: Responder, files: RequestFiles, task: str
) -> int:
    async with files.open() as folder:
        form = await read_form(request, folder)
        wanted = form.text("response_format", "json")
        if wanted not in FORMATS:
            raise invalid_field("response_format", f"response_format must be one of {', '.join(FORMATS)}.")
        rpc_request = _transcript_request(client, form, task)
        rpc_request.dst = await MediaBody(form, folder).required_file("file")
        if form.flag("stream"):
            return await _stream(client, rpc_request, responder)
        result = await client.call("AudioTranscription", rpc_request, pb.TranscriptResult)
        kind, body = FORMATS[wanted](result, task)
        await responder.send(200, ((b"content-type", kind),), body)
        return 200


def _transcript_request(client: BackendClient, form: FormBody, task: str) -> pb.TranscriptRequest:
    granularities = form.texts("timestamp_granularities")
    if unknown := [each for each in granularities if each not in _GRANULARITIES]:
        raise invalid_field(
            "timestamp_granularities", f"timestamp_granularities: {unknown[0][:40]!r} is neither segment nor word."
        )
    process = client.process
    threads = process.setting("threads")
    language = process.setting("parameters", "language")
    return pb.TranscriptRequest(
        language=form.text("language") or (language if isinstance(language, str) else ""),
        threads=threads if isinstance(threads, int) and 0 < threads < 1024 else 0,
        translate=task == "translate" or form.flag("translate"),
        diarize=form.flag("diarize") or form.text("response_format") == "diarized_json",
        prompt=form.text("prompt"),
        temperature=form.number("temperature") or 0.0,
        timestamp_granularities=granularities,
        stream=form.flag("stream"),
        ModelIdentity=process.identity,
    )


async def _stream(client: BackendClient, request: pb.TranscriptRequest, responder: Responder) -> int:
    async with AsyncExitStack() as stack:
        replies = await client.enter_stream(stack, "AudioTranscriptionStream", request)
        if replies is None:
            request.stream = False
            replies = _single(await client.call("AudioTranscription", request, pb.TranscriptResult))
        await responder.stream(200, EVENTS, _events(replies))
    return 200


async def _single(result: pb.TranscriptResult) -> AsyncIterator[pb.TranscriptStreamResponse]:
    """For a backend without streams: the whole answer as one reply."""
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
    except (ApiError, UpstreamFailed) as failure:
        broken = failure if isinstance(failure, ApiError) else ApiError(502, str(failure), code="upstream_failed")
        yield b"data: %b\n\n" % broken.body
        return
    yield event({"type": "transcript.text.done", "text": whole or "".join(said)})


async def diarize(client: BackendClient, request: Request, responder: Responder, files: RequestFiles) -> int:
    async with files.open() as folder:
        form = await read_form(request, folder)
        rpc_request = pb.DiarizeRequest(
            dst=await MediaBody(form, folder).required_file("file"),
            language=form.text("language"),
            num_speakers=form.whole("num_speakers") or 0,
            min_speakers=form.whole("min_speakers") or 0,
            max_speakers=form.whole("max_speakers") or 0,
            clustering_threshold=form.number("clustering_threshold") or 0,
            min_duration_on=form.number("min_duration_on") or 0,
            min_duration_off=form.number("min_duration_off") or 0,
            include_text=form.flag("include_text"),
            ModelIdentity=client.process.identity,
        )
        result = await client.call("Diarize", rpc_request, pb.DiarizeResponse)
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
