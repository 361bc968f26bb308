"""Whatever JSON a client sends is either understood or refused by a name: never a fault of ours."""

from __future__ import annotations

import contextlib
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from corral.contract import backend_pb2 as pb
from corral.inference.api_errors import ApiError
from corral.inference.backend_process import BackendProcess
from corral.inference.grpc.predict_options import chat_options, completion_options, prompts_of
from corral.inference.grpc.replies import ReplyReader, join_deltas
from corral.inference.openai.grammars import schema_grammar
from corral.inference.openai.json_body import JsonBody
from corral.inference.openai.messages import offered_tools
from corral.inference.routes.embeddings import read_documents, read_inputs
from corral.inference.routes.images import image_request
from corral.inference.routes.sounds import sound_request
from corral.inference.routes.speech import tts_request
from corral.inference.routes.videos import object_request, video_request

scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.sampled_from(["function", "auto"])
)
KEYS = (
    *("role", "content", "type", "text", "image_url", "url", "input_audio", "data", "function", "name", "arguments"),
    *(
        "parameters",
        "json_schema",
        "schema",
        "properties",
        "items",
        "enum",
        "anyOf",
        "$ref",
        "required",
        "include_usage",
    ),
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(KEYS), inner, max_size=3)),
    max_leaves=8,
)
ASKED = (
    *("model", "prompt", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "n", "seed", "stop"),
    *(
        "logprobs",
        "top_logprobs",
        "logit_bias",
        "tools",
        "functions",
        "tool_choice",
        "function_call",
        "response_format",
    ),
    *("metadata", "reasoning_effort", "chat_template_kwargs", "stream_options", "ignore_eos", "grammar", "min_p"),
    *("size", "step", "width", "num_frames", "fps", "seconds", "cfg_scale", "text", "duration_seconds", "bpm", "think"),
    *("caption", "quality", "points", "stream", "output_format"),
    *("input", "documents", "voice", "params", "speed", "language", "instructions", "negative_prompt", "mirostat"),
)
bodies = st.dictionaries(st.sampled_from(ASKED), values, max_size=5)
HELLO = [{"role": "user", "content": "hi"}]
MODEL = BackendProcess("x:1", "m", "b", load='{"Model": "w"}')
few = settings(max_examples=100, deadline=None)


@few
@given(bodies, st.one_of(st.just(HELLO), values, st.lists(st.dictionaries(st.sampled_from(KEYS), values), max_size=2)))
def test_a_chat(body: dict[str, Any], messages: Any) -> None:
    with contextlib.suppress(ApiError):
        chat_options(MODEL, JsonBody({**body, "messages": messages}), 1).SerializeToString()


@few
@given(bodies)
def test_everything_else(body: dict[str, Any]) -> None:
    asked = JsonBody(body)
    for read in (
        lambda: completion_options(MODEL, asked, "x", 1).SerializeToString(),
        lambda: prompts_of(asked),
        lambda: read_inputs(asked),
        lambda: read_documents(asked),
        lambda: tts_request(MODEL, asked).SerializeToString(),
        lambda: image_request(MODEL, JsonBody({"prompt": "x", **body})).SerializeToString(),
        lambda: video_request(MODEL, JsonBody({"prompt": "x", **body})).SerializeToString(),
        lambda: object_request(MODEL, asked).SerializeToString(),
        lambda: sound_request(MODEL, JsonBody({"text": "x", **body})).SerializeToString(),
        lambda: asked.numbers("points"),
    ):
        with contextlib.suppress(ApiError):
            read()


@few
@given(st.sampled_from(ASKED), values)
def test_one_thing_wrong_in_a_chat(key: str, value: Any) -> None:
    with contextlib.suppress(ApiError):
        chat_options(MODEL, JsonBody({"messages": HELLO, key: value}), 1).SerializeToString()
        offered_tools(JsonBody({key: value}))


@few
@given(values)
def test_a_definition(value: Any) -> None:
    """What a model's owner wrote is no reason to refuse a client, nor to fail."""
    keys = ("parameters", "template", "roles", "stopwords", "system_prompt", "threads", "reasoning", "tts", "main_gpu")
    for key in keys:
        model = BackendProcess("x:1", "m", "b", definition={key: value})
        chat_options(model, JsonBody({"messages": HELLO}), 1).SerializeToString()
        tts_request(model, JsonBody({"input": "x"})).SerializeToString()
    for key in ("step", "cfg_scale", "diffusers"):
        model = BackendProcess("x:1", "m", "b", definition={key: value})
        image_request(model, JsonBody({"prompt": "x"})).SerializeToString()
        video_request(model, JsonBody({"prompt": "x"})).SerializeToString()
    for key in ("temperature", "max_tokens", "seed", "top_k", "batch", "negative_prompt", "ignore_eos"):
        model = BackendProcess("x:1", "m", "b", definition={"parameters": {key: value}})
        chat_options(model, JsonBody({"messages": HELLO}), 1).SerializeToString()


@few
@given(st.dictionaries(st.sampled_from(KEYS), values, max_size=4))
def test_a_schema(schema: dict[str, Any]) -> None:
    with contextlib.suppress(ApiError):
        assert schema_grammar(schema).startswith("root ::= ")


@few
@given(st.lists(st.binary(max_size=6), max_size=6), st.binary(max_size=12))
def test_replies_of_any_bytes(pieces: list[bytes], logprobs: bytes) -> None:
    for tools in ((), ("f",)):
        reading = ReplyReader(tools)
        deltas = [reading.feed(pb.Reply(message=piece, logprobs=logprobs)) for piece in pieces]
        join_deltas([*deltas, reading.finish()])
