"""Grammars from schemas, tried by a small reader of the notation: it takes what fits the schema, and nothing else."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from corral.inference.api_errors import ApiError
from corral.inference.openai.grammars import JSON_OBJECT, grammar_of, schema_grammar
from corral.inference.openai.json_body import JsonBody

_TOKEN = re.compile(r'\s*("(?:[^"\\]|\\.)*"|\[(?:[^\]\\]|\\.)*\]|[a-z][a-z0-9]*|[()|*+?])')


class Reader:
    """Takes a text or not. Knows as much of GBNF as the room writes."""

    def __init__(self, grammar: str) -> None:
        self._rules = {}
        for line in grammar.splitlines():
            name, _, body = line.partition(" ::= ")
            tokens = _TOKEN.findall(body)
            self._rules[name], rest = self._alternatives(tokens)
            assert rest == [], f"{name}: {rest}"

    def takes(self, text: str) -> bool:
        return len(text) in self._match(("rule", "root"), text, 0)

    def _alternatives(self, tokens: list[str]) -> tuple[Any, list[str]]:
        options: list[Any] = []
        sequence: list[Any] = []
        while tokens and tokens[0] != ")":
            token, tokens = tokens[0], tokens[1:]
            if token == "|":
                options.append(("seq", sequence))
                sequence = []
            elif token in "*+?":
                sequence[-1] = (token, sequence[-1])
            elif token == "(":
                inner, tokens = self._alternatives(tokens)
                assert tokens[0] == ")"
                tokens = tokens[1:]
                sequence.append(inner)
            elif token[0] == '"':
                sequence.append(("text", json.loads(token)))
            elif token[0] == "[":
                sequence.append(("chars", re.compile(token)))
            else:
                sequence.append(("rule", token))
        return ("any", [*options, ("seq", sequence)]), tokens

    def _match(self, node: Any, text: str, at: int) -> set[int]:
        kind, inner = node
        if kind == "text":
            return {at + len(inner)} if text.startswith(inner, at) else set()
        if kind == "chars":
            return {at + 1} if at < len(text) and inner.match(text[at]) else set()
        if kind == "rule":
            return self._match(self._rules[inner], text, at)
        if kind == "any":
            return set().union(*(self._match(each, text, at) for each in inner))
        if kind == "seq":
            ends = {at}
            for each in inner:
                ends = set().union(*(self._match(each, text, end) for end in ends))
            return ends
        ends, new = ({at} if kind in "*?" else set()), self._match(inner, text, at)
        while new - ends:
            ends, fresh = ends | new, new - ends
            new = set().union(*(self._match(inner, text, end) for end in fresh)) if kind in "*+" else set()
        return ends


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}},
        "boss": {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
    },
    "required": ["name", "boss"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("value", "good"),
    [
        ('{"name":"x","boss":null}', True),
        ('{"name": "x", "age": 5, "tags": ["a","b"], "boss": null}', True),
        ('{"name":"x","tags":[],"boss":{"name":"y","boss":null}}', True),
        ('{"name":"quo\\"te \\u00e9","boss":null}', True),
        ('{"boss":null}', False),
        ('{"name":"x"}', False),
        ('{"name":"x","age":5.5,"boss":null}', False),
        ('{"name":"x","tags":["c"],"boss":null}', False),
        ('{"name":"x","boss":null,"more":1}', False),
        ('{"name":"x",,"boss":null}', False),
        ("[]", False),
    ],
)
def test_what_fits_and_what_does_not(value: str, good: bool) -> None:
    assert Reader(schema_grammar(PERSON)).takes(value) is good


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (
            {"type": "object", "properties": {"a": {}, "b": {}}},
            ["{}", '{"a":1}', '{"b":[]}', '{"a":1,"b":2}'],
            ['{"c":1}'],
        ),
        ({"type": ["string", "null"]}, ['"x"', "null"], ["1"]),
        ({"const": {"a": 'q"'}}, ['{"a":"q\\""}'], ["{}"]),
        ({"type": "array", "items": {"type": "number"}, "minItems": 2}, ["[1, -2.5e3]"], ["[1]", "[]"]),
        ({"type": "boolean"}, ["true"], ["True"]),
        ({"allOf": [{"type": "boolean"}], "description": "x"}, ["true"], ["1"]),
        ({}, ["[1]", "{}", '"x"'], ["x"]),
        ({"$ref": "#/$defs/n", "$defs": {"n": {"type": "integer"}}}, ["5"], ["5.5"]),
    ],
)
def test_small_schemas(schema: dict[str, Any], good: list[str], bad: list[str]) -> None:
    reader = Reader(schema_grammar(schema))
    assert [text for text in good if not reader.takes(text)] == []
    assert [text for text in bad if reader.takes(text)] == []


def test_any_object() -> None:
    reader = Reader(JSON_OBJECT)
    assert reader.takes('{"a": [1, {"b": null}], "c": "\\n"}')
    assert not reader.takes("[1]")


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [{}, {}]},
        {"not": {}},
        {"$ref": "https://elsewhere/x"},
        {"$ref": "#/$defs/absent"},
        {"type": "date"},
        {"enum": []},
        {"properties": {"a": 5}},
        {"type": "array", "minItems": 1000},
        5,
    ],
)
def test_what_cannot_be_held_to_is_refused(schema: Any) -> None:
    told = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}
    with pytest.raises(ApiError) as refused:
        grammar_of(JsonBody(told))
    assert (refused.value.status, refused.value.param) == (400, "response_format")


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"properties": {"a": {}}, "required": 5}, "required must be a list of names"),
        ({"properties": {"a": {}}, "required": [{}]}, "required must be a list of names"),
        (nested(450), "nested too deeply"),
        ({"type": ["string"] * 8}, "no more than 7 types"),
    ],
)
def test_what_would_break_us_or_take_for_ever_is_refused_too(schema: dict[str, Any], why: str) -> None:
    with pytest.raises(ApiError, match=why):
        schema_grammar(schema)


@pytest.mark.parametrize("part", [b"[]", b"{}", b'{"x":0}'])
def test_a_body_of_a_million_little_things_is_refused_before_it_is_built(part: bytes) -> None:
    """Empty lists of 32 MB took ten seconds, and everybody else waited."""
    with pytest.raises(ApiError, match="more than 1000000 lists") as refused:
        JsonBody.read(b'{"x": [' + b",".join([part] * 1_000_001) + b"]}")
    assert refused.value.status == 413
    long = JsonBody.read(b'{"x": "' + b"long, but one text" * 100_000 + b'"}')
    assert len(long.text("x")) == 1_800_000
    assert len(JsonBody.read(b'{"audio": [' + b"0.5," * 1_600_000 + b"0]}").get("audio")) == 1_600_001, "of 100 seconds"
