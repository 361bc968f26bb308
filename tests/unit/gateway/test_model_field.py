"""Reads `model` of a body: repeated keys are always noticed, and no body makes the reader fail otherwise."""

from __future__ import annotations

import json
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.gateway.http.model_field import BadBody, FieldReader, read_fast

reader = FieldReader()  # one for all tests: what it read before must not matter


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"model":"m"}', "m"),
        (b'{"model":"m","stream":true}', "m"),
        (b' \n{ "stream" : true , "messages" : [ ] , "model" : "m" } ', "m"),
        (b'{"model":"m","stream":false}', "m"),
        (b'{"model":"m","stream":null}', "m"),
        (b'{"model":"m","stream":"yes"}', "m"),
        (b'{"mod\\u0065l":"m"}', "m"),
        (b'{"model":"org/m\\u00e9l:7b"}', "org/m\u00e9l:7b"),
        (b'{"model":"\\ud83d\\ude00"}', "\U0001f600"),
        (b'{"model":"m","messages":[{"model":"x"},{"model":"y"}],"tools":{"model":1}}', "m"),
        (b'{"messages":[{"content":"\\"model\\":\\"x\\", \\"model"}],"model":"m"}', "m"),
        (b'{"Model":"x","model":"m"}', "m"),
    ],
)
def test_the_model_is_read(body: bytes, expected: str) -> None:
    assert reader.read(body) == expected


def test_the_model_of_a_sound_may_be_named_by_model_id() -> None:
    assert reader.read(b'{"model_id":"m"}', or_model_id=True) == "m"
    assert reader.read(b'{"model_id":"x","model":"m"}', or_model_id=True) == "m"
    with pytest.raises(BadBody, match="`model_id` is given twice"):
        reader.read(b'{"model_id":"a","model_id":"b"}', or_model_id=True)
    with pytest.raises(BadBody, match="must provide a `model`"):
        reader.read(b'{"model_id":"m"}')
    assert reader.read(b'{"model":"m","model_id":1,"model_id":2}') == "m"


@pytest.mark.parametrize(
    ("body", "words", "param"),
    [
        (b"", "not JSON", None),
        (b"{", "not JSON", None),
        (b'{"model":"m"} trailing', "not JSON", None),
        (b'{"model":"m",}', "not JSON", None),
        (b'{"temperature":NaN,"model":"m"}', "not JSON", None),
        (b'\xef\xbb\xbf{"model":"m"}', "not JSON", None),
        (b'{"model":"\\ud800"}', "not JSON", None),
        (b'{"\xff":1,"model":"m"}', "not JSON", None),
        (b"[]", "must be a JSON object", None),
        (b"null", "must be a JSON object", None),
        (b'"model"', "must be a JSON object", None),
        (b'{"x":' + b"[" * 100_000, "nested too deeply", None),
        (b"{}", "must provide a `model`", "model"),
        (b'{"model":null}', "must provide a `model`", "model"),
        (b'{"Model":"m"}', "must provide a `model`", "model"),
        (b'{"model":1}', "must be a string", "model"),
        (b'{"model":{"id":"m"}}', "must be a string", "model"),
        (b'{"model":"\xff"}', "must be a string", "model"),
        (b'{"model":""}', "is empty", "model"),
        (b'{"model":"a","model":"b"}', "given twice", "model"),
        (b'{"model":"a","x":1,"model":"a"}', "given twice", "model"),
        (b'{"model":"a","mod\\u0065l":"b"}', "given twice", "model"),
        (b'{"\\u006D\\u006fdel":"a","model":"b"}', "given twice", "model"),
        (b'{"model":"a","model":null}', "given twice", "model"),
    ],
)
def test_a_body_that_cannot_be_routed_says_why(body: bytes, words: str, param: str | None) -> None:
    with pytest.raises(BadBody, match=words) as caught:
        reader.read(body)
    assert caught.value.param == param
    assert reader.read(b'{"model":"next"}') == "next"


letters = st.characters(exclude_categories=["Cs"])  # a lone surrogate cannot be written as UTF-8
names = st.one_of(st.sampled_from(["model", "stream", "mode", "models", "messages"]), st.text(letters, max_size=6))
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(letters),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=8,
)
models = st.text(letters, min_size=1)


def spelled(name: str, escaped: bool) -> str:
    return '"' + "".join(f"\\u{ord(letter):04x}" for letter in name) + '"' if escaped else json.dumps(name)


@given(st.lists(st.tuples(names, st.booleans(), values)), models, st.integers(0, 20), st.booleans(), st.booleans())
def test_the_model_is_found_exactly_when_it_stands_there_once(
    others: list[tuple[str, bool, object]], model: str, place: int, escaped: bool, ascii_only: bool
) -> None:
    fields = [(name, escape and name.isascii(), value) for name, escape, value in others]
    fields.insert(place, ("model", escaped, model))
    text = ",".join(f"{spelled(n, e)}:{json.dumps(v, ensure_ascii=ascii_only)}" for n, e, v in fields)
    body = ("{" + text + "}").encode()
    if [name for name, _, _ in fields].count("model") > 1:
        with pytest.raises(BadBody, match="given twice"):
            reader.read(body)
    else:
        assert reader.read(body) == model


@given(st.binary())
def test_anything_else_is_refused_in_words(body: bytes) -> None:
    try:
        found = reader.read(body)
    except BadBody:
        return
    assert json.loads(body)["model"] == found


def test_a_body_of_countless_fields_takes_no_memory() -> None:
    body = b'{"model":"m"' + b',"a":1' * 300_000 + b"}"
    tracemalloc.start()
    try:
        assert reader.read(body) == "m"
        assert tracemalloc.get_traced_memory()[1] < 64 * 1024
    finally:
        tracemalloc.stop()


PLAIN = b'{"model":"m","stream":true,"messages":[{"role":"user","content":"a\\n\\u00e9"}]}'
KEYS = st.sampled_from(
    ["model", "mod\\u0065l", "\\u006dodel", "\\u006Dodel", "Model", "stream", "x", "models", "\\u006b"]
)
VALUES = st.sampled_from(
    [
        '"m"',
        '"n"',
        '""',
        "null",
        "true",
        "false",
        "1",
        "1e5",
        '{"model":"y"}',
        '["model"]',
        '"model"',
        '"\\"model\\""',
        "nul",
    ]
)


def test_plain_bodies_are_read_plainly() -> None:
    assert read_fast(PLAIN) == "m"
    assert read_fast(b' { "stream" : false, "model" : "org/m:7b" } ') == "org/m:7b"


@given(st.lists(st.tuples(KEYS, VALUES), max_size=5), st.sampled_from(["", " ", ",", "}", "\xff"]))
def test_what_is_read_plainly_is_what_the_reader_reads(pairs: list[tuple[str, str]], rest: str) -> None:
    body = ("{" + ",".join(f'"{key}":{value}' for key, value in pairs) + "}" + rest).encode("latin-1")
    assert_agreement(body)


@given(st.binary(max_size=60) | st.text().map(lambda text: json.dumps({"model": text, "x": text}).encode()))
def test_they_agree_on_anything(body: bytes) -> None:
    assert_agreement(body)


@given(st.integers(0, len(PLAIN) - 1), st.binary(min_size=1, max_size=3))
def test_they_agree_on_damaged_bodies(at: int, damage: bytes) -> None:
    assert_agreement(PLAIN[:at] + damage + PLAIN[at + len(damage) :])


def assert_agreement(body: bytes) -> None:
    plain = read_fast(body)
    if plain is not None:  # else nothing is claimed
        assert reader.read(body) == plain


def test_a_name_that_no_model_can_have() -> None:
    """It would be kept in a receipt, and told in a log."""
    with pytest.raises(BadBody, match="too long"):
        FieldReader().read(b'{"model": "' + b"m" * 2000 + b'"}')


def test_a_body_of_a_million_fields_is_refused_before_it_is_read() -> None:
    body = b'{"model": "m"' + b"".join(b', "%x": 0' % number for number in range(1_000_000)) + b"}"
    assert read_fast(body) is None
    with pytest.raises(BadBody, match="more than 1000000 fields"):
        FieldReader().read(body)
    long = b'{"model": "m", "prompt": "' + b"12:34:56 a line of a log " * 100_000 + b'"}'
    assert FieldReader().read(long) == read_fast(long) == "m"
