"""What is read out of bytes that pass: tokens at the end of an answer, the model in a body of many parts."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.gateway.http.model_field import BadBody
from corral.gateway.http.multipart import boundary_of, read_model
from corral.gateway.receipts.usage import BEGINNING_BYTES, TAIL_BYTES, Usage, UsageTap, both_ends, read_usage

SSE = ((b"content-type", b"text/event-stream; charset=utf-8"),)
JSON = ((b"content-type", b"application/json"),)


@pytest.mark.parametrize(
    ("tail", "usage"),
    [
        (b'"usage":{"prompt_tokens":8,"completion_tokens":9,"total_tokens":17}}', Usage(8, 9)),
        (b'"usage": {"completion_tokens": 9, "prompt_tokens": 8}}', Usage(8, 9)),
        (b'"usage":{"prompt_tokens":8,"total_tokens":8}}', Usage(8, 0)),
        (b'"usage":{"input_tokens":8,"input_tokens_details":{"cached_tokens":3},"output_tokens":9}}', Usage(8, 9)),
        (
            b'"usage":{"prompt_tokens":1,"completion_tokens":1}} "usage":{"prompt_tokens":8,"completion_tokens":9}',
            Usage(8, 9),
        ),
        (b'{"usage":null}', None),
        (b'{"text":"\\"usage\\":{\\"prompt_tokens\\":5}"}', None),
        (b'"timings":{"prompt_n":8,"prompt_ms":1.5,"predicted_n":9,"predicted_ms":2.5}}', Usage(8, 9)),
        (b'"timings":{"cache_n":30,"prompt_n":1,"prompt_ms":1.5,"predicted_n":9,"predicted_ms":2.5}}', Usage(31, 9)),
        (b'"usage":{"cache_read_input_tokens":30,"input_tokens":1,"output_tokens":9}}', Usage(31, 9)),
        (b'"usage":{"input_tokens":1,"cache_creation_input_tokens":7,"output_tokens":9}}', Usage(8, 9)),
        (b'"usage":{"prompt_tokens":8,"cached_tokens":3,"completion_tokens":9}}', Usage(8, 9)),
        (b"", None),
    ],
)
def test_usage_at_the_end_of_an_answer(tail: bytes, usage: Usage | None) -> None:
    assert read_usage(tail) == usage


@given(st.binary(max_size=300))
def test_any_bytes_may_pass(raw: bytes) -> None:
    read_usage(raw)
    read_usage(b'"usage":{' + raw)


def tapped(headers: tuple[tuple[bytes, bytes], ...], *chunks: bytes, status: int = 200) -> Usage:
    tap = UsageTap()
    tap.head(status, headers)
    for chunk in chunks:
        tap.data(chunk)
    return tap.usage()


def test_a_stream_is_counted_where_it_does_not_tell() -> None:
    events = [b'2e\r\ndata: {"choices":[{"delta":{"content":"a"}}]}\n\n\r\n'] * 40
    assert tapped(SSE, *events, b"e\r\ndata: [DONE]\n\n\r\n") == Usage(0, 40, estimated=True)
    told = b'48\r\ndata: {"choices":[],"usage":{"prompt_tokens":8,"comp'
    assert tapped(SSE, *events, told, b'\r\n20\r\nletion_tokens":9}}\n\n\r\n', b"data: [DONE]\n\n") == Usage(8, 9)
    fast = b"".join(events * 100)
    assert abs(tapped(SSE, fast).completion - 4000) < 200


ROLE = b'data: {"choices":[{"delta":{"role":"assistant","content":null}}]}\n\n'
EMPTY = b'data: {"choices":[{"delta":{"content":""}}]}\n\n'
CREATED = (
    b'event: response.created\ndata: {"response":{"output":[],"text":{"format":{"type":"text"}},"reasoning":null}}\n\n'
)
STARTED = b'data: {"type":"content_block_start","content_block":{"type":"text","text":""}}\n\n'


@pytest.mark.parametrize(
    "event",
    [
        b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n',
        b'data: {"choices": [{"delta": {"content": "\\n"}}]}\n\n',
        b'data: {"choices":[{"delta":{"reasoning_content":"so"}}]}\n\n',
        b'data: {"choices":[{"delta":{"tool_calls":[{"index":0,"function":{"name":"f","arguments":""}}]}}]}\n\n',
        b'data: {"choices":[{"text":"a"}]}\n\n',
        b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta","delta":"a"}\n\n',
        b'data: {"type":"response.output_item.added","item":{"type":"function_call","arguments":""}}\n\n',
        b'data: {"type":"content_block_delta","delta":{"type":"text_delta","text":"a"}}\n\n',
        b'data: {"type":"content_block_delta","delta":{"type":"thinking_delta","thinking":"a"}}\n\n',
        b'data: {"type":"content_block_start","content_block":{"type":"tool_use","name":"f","input":{}}}\n\n',
    ],
)
def test_the_first_event_with_something_generated_is_the_first(event: bytes) -> None:
    before = (ROLE, EMPTY, CREATED, STARTED)
    for split in (0, 20, len(event) - 8):
        moments = first_after_each(*before, event[:split], event[split:], event)
        assert moments[:4] == [None] * 4
        assert moments[-2] is not None
        assert moments[-1] == moments[-2]


def first_after_each(*chunks: bytes) -> list[float | None]:
    tap = UsageTap()
    tap.head(200, SSE)
    moments = []
    for chunk in chunks:
        tap.data(chunk)
        moments.append(tap.first_at)
    return moments


@pytest.mark.parametrize(("headers", "status"), [(JSON, 200), (SSE, 500)])
def test_only_streams_that_went_well_have_a_first(headers: tuple[tuple[bytes, bytes], ...], status: int) -> None:
    tap = UsageTap()
    tap.head(status, headers)
    tap.data(b'{"choices":[{"message":{"content":"a"}}]}')
    assert tap.first_at is None


VECTORS = b'{"object":"list","usage":{"prompt_tokens":8,"total_tokens":8},"data":[' + b"0.25," * 2000 + b"0.5]}"


def test_usage_before_a_long_list() -> None:
    """llama.cpp writes it before vectors and scores."""
    assert tapped(JSON, VECTORS) == tapped(JSON, VECTORS[:3000], VECTORS[3000:]) == Usage(8, 0)
    assert read_usage(both_ends(VECTORS)) == Usage(8, 0)
    cut = b'{"x":"' + b"x" * (BEGINNING_BYTES - 35) + b'","usage":{"prompt_tokens":1234}}' + b" " * TAIL_BYTES
    assert cut.index(b"1234") < BEGINNING_BYTES < cut.index(b"1234") + 4
    assert read_usage(both_ends(cut)) is None, "rather than a part of the number"


def test_a_stream_that_tells_of_the_prompt_when_it_begins() -> None:
    begins = b'event: message_start\ndata: {"message":{"usage":{"input_tokens":8,"output_tokens":0}}}\n\n'
    pieces = [b'event: content_block_delta\ndata: {"delta":{"text":"a"}}\n\n'] * 200
    ends = b'event: message_delta\ndata: {"usage":{"output_tokens":200}}\n\nevent: message_stop\ndata: {}\n\n'
    assert tapped(SSE, begins, *pieces, ends) == Usage(8, 200)
    assert tapped(SSE, begins, *pieces) == Usage(8, 200, estimated=True), "the client left"


def test_an_answer_that_failed_or_tells_nothing_costs_nothing() -> None:
    assert tapped(JSON, b'{"usage":{"prompt_tokens":8,"completion_tokens":9}}', status=500) == Usage()
    assert tapped(JSON, b"{}") == tapped(JSON) == Usage()
    assert tapped(JSON, b"x" * 100_000 + b'"usage":{"prompt_tokens":8,"completion_tokens":9}}') == Usage(8, 9)
    assert TAIL_BYTES == 4096


def part(name: str, value: bytes, more: str = "") -> bytes:
    return f'--B\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n'.encode() + value + b"\r\n"


@pytest.mark.parametrize(
    ("parts", "found"),
    [
        ([part("model", b"small")], "small"),
        ([part("file", b"\r\n\r\n--A\0", '; filename="a"'), part("model", b"org/large")], "org/large"),
        ([part("model", b"upload", '; filename="model"'), part("model", b"small")], "small"),
        ([b"--B\r\ncontent-type: text/plain\r\nCONTENT-DISPOSITION: form-data; name=model\r\n\r\nsmall\r\n"], "small"),
    ],
)
def test_the_model_wherever_it_stands(parts: list[bytes], found: str) -> None:
    body = b"".join(parts) + b"--B--\r\n"
    named = read_model(body, b"B")
    assert named.model == found
    assert body[named.start : named.end] == found.encode()


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (part("file", b"x") + b"--B--", "must provide"),
        (part("model", b"") + b"--B--", "must provide"),
        (part("model", b"a") + part("model", b"b") + b"--B--", "twice"),
        (part("model", b"a" * 2000) + b"--B--", "too long"),
        (part("model", b"\xff") + b"--B--", "text"),
        (b"nothing of the kind", "boundary"),
        (b"--B\r\nContent-Disposition: form-data; name=model", "complete head"),
        (b'--B\r\nContent-Disposition: form-data; name="model"\r\n\r\nsmall', "middle"),
        (b"--B\r\n\r\n" * 5000 + b"--B--", "more than 1024 parts"),  # a body full of them would take a minute
    ],
)
def test_bodies_that_cannot_be_routed(body: bytes, words: str) -> None:
    with pytest.raises(BadBody, match=words):
        read_model(body, b"B")


@pytest.mark.parametrize("before", [1, 1024 * 1024 - 100, 1024 * 1024 - 1, 1024 * 1024 + 1, 3 * 1024 * 1024])
def test_the_model_behind_a_large_file(before: int) -> None:
    parts = part("file", b"x" * before, '; filename="a"') + part("model", b"small")
    assert read_model(parts + b"--B--\r\n", b"B").model == "small"


@given(st.binary(max_size=200))
def test_any_body_is_read_or_refused(raw: bytes) -> None:
    for body in (raw, b"--B" + raw, part("model", raw) + raw + b"--B--"):
        with contextlib.suppress(BadBody):
            read_model(body, b"B")


def test_boundaries() -> None:
    assert boundary_of(b"multipart/form-data; boundary=abc") == b"abc"
    assert boundary_of(b'multipart/form-data; Boundary="a b"; charset=x') == b"a b"
    with pytest.raises(BadBody):
        boundary_of(b"multipart/form-data")
