from __future__ import annotations

from typing import Any

import pytest

from corral.controller.web.reference import Word, example_of, read_reference, words_of

NODE: dict[str, Any] = {"$ref": "#/components/schemas/Node"}
OPENAPI: dict[str, Any] = {
    "paths": {
        "/api/node/register": {
            "post": {"tags": ["node self-service"], "summary": "Join", "responses": {"201": {"description": "made"}}}
        },
        "/api/nodes/{node}": {
            "get": {
                "tags": ["nodes"],
                "summary": "One node",
                "parameters": [
                    {"name": "node", "in": "path", "required": True, "schema": {"type": "string"}},
                    {"name": "limit", "in": "query", "schema": {"type": "integer", "description": "At most"}},
                ],
                "responses": {"200": {"content": {"application/json": {"schema": NODE}}}, "400": {"description": "no"}},
            },
            "put": {
                "tags": ["nodes"],
                "requestBody": {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/Ask"}}}},
                "responses": {"204": {"description": "done"}},
            },
        },
        "/api/events": {
            "get": {"responses": {"200": {"content": {"text/event-stream": {"schema": {"type": "string"}}}}}}
        },
    },
    "components": {
        "schemas": {
            "Node": {
                "type": "object",
                "description": "A machine.",
                "required": ["name"],
                "properties": {
                    "name": {"type": "string"},
                    "parts": {"type": "array", "items": {"$ref": "#/components/schemas/Part"}},
                },
            },
            "Part": {"type": "object", "properties": {"inside": NODE}},  # shapes may turn in a circle
            "Ask": {"type": "object", "properties": {"value": {"type": "string"}, "uses": {"default": 1}}},
            "Unused": {"type": "object"},
        }
    },
}
ROLES = {("GET", "/api/nodes/{node}"): "viewer or admin", ("POST", "/api/node/register"): "a join token"}


def test_sections_for_people_come_first() -> None:
    sections, _ = read_reference(OPENAPI, ROLES, "https://fleet")
    assert [section.name for section in sections] == ["nodes", "other", "node self-service"]


def test_one_operation_says_everything() -> None:
    sections, _ = read_reference(OPENAPI, ROLES, "https://fleet")
    show, put = sections[0].operations
    assert (show.method, show.path, show.summary, show.role) == (
        "GET",
        "/api/nodes/{node}",
        "One node",
        "viewer or admin",
    )
    assert [(p.name, p.place, p.required, p.description) for p in show.parameters] == [
        ("node", "path", True, ""),
        ("limit", "query", False, "At most"),
    ]
    assert [(answer.status, answer.words) for answer in show.answers] == [("200", (Word("Node", "Node"),))]
    assert show.curl == "curl -H \"Authorization: Bearer $CORRAL_KEY\" 'https://fleet/api/nodes/{node}'"
    assert put.body == (Word("Ask", "Ask"),)
    assert put.answers[0].words == (Word("nothing"),)
    assert put.curl == 'curl -X PUT --json \'{"value": "…", "uses": 1}\' \'https://fleet/api/nodes/{node}\''


def test_machines_show_their_own_token_and_streams_their_type() -> None:
    sections, _ = read_reference(OPENAPI, ROLES, "https://fleet")
    assert "$NODE_TOKEN" in sections[2].operations[0].curl
    assert sections[1].operations[0].answers[0].words == (Word("text/event-stream"),)


def test_only_shapes_that_are_mentioned_and_each_once() -> None:
    _, shapes = read_reference(OPENAPI, ROLES, "")
    assert [shape.name for shape in shapes] == ["Ask", "Node", "Part"]
    node = shapes[1]
    assert node.description == "A machine."
    assert [(field.name, field.required) for field in node.fields] == [("name", True), ("parts", False)]
    assert node.fields[1].words == (Word("list of "), Word("Part", "Part"))


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({}, "anything"),
        ({"type": ["string", "null"]}, "string or null"),
        ({"oneOf": [{"type": "null"}, {"type": "integer"}]}, "integer or null"),
        ({"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}]}, "list of string or null"),
        ({"enum": ["a", 1]}, '"a" or 1'),
        ({"type": "object", "additionalProperties": {"type": "string"}}, "map of string to string"),
        ({"type": "object"}, "object"),
        ({"type": "array"}, "list of anything"),
    ],
)
def test_types_in_words(schema: dict[str, Any], words: str) -> None:
    assert "".join(word.text for word in words_of(schema)) == words


@pytest.mark.parametrize(
    ("schema", "example"),
    [
        ({"oneOf": [{"type": "integer"}, {"type": "null"}]}, None),
        ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, 1),
        ({"type": "object", "additionalProperties": {"type": "string"}}, {"key": "value"}),
        ({"type": "array", "items": {"type": "string"}}, []),
        ({"type": "boolean"}, False),
        ({"type": "string", "default": "x"}, "x"),
    ],
)
def test_examples(schema: dict[str, Any], example: object) -> None:
    assert example_of(schema, {}) == example


def test_an_example_of_a_shape_that_holds_itself_ends() -> None:
    me = {"type": "object", "properties": {"me": {"$ref": "#/components/schemas/Me"}}}
    assert example_of({"$ref": "#/components/schemas/Me"}, {"Me": me}) == {"me": {"me": {"me": {}}}}
