"""The reference of the HTTP API for `docs.html`: sections from the OpenAPI document, and the role of each route.

The roles are read from the guards of the routes, so the reference cannot differ from them.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from litestar.routes import BaseRoute, HTTPRoute

from corral.controller.api import auth

_OF_MACHINES = "node self-service"
_METHODS = ("get", "post", "put", "patch", "delete")
Schema = Mapping[str, Any]


@dataclass(frozen=True)
class Word:
    """A piece of a type's description; `shape` names the shape it links to."""

    text: str
    shape: str = ""


Words = tuple[Word, ...]


@dataclass(frozen=True)
class Parameter:
    name: str
    place: str
    words: Words
    required: bool
    description: str


@dataclass(frozen=True)
class ApiResponse:
    status: str
    words: Words


@dataclass(frozen=True)
class Operation:
    anchor: str
    method: str
    path: str
    summary: str
    role: str
    parameters: tuple[Parameter, ...]
    body: Words
    answers: tuple[ApiResponse, ...]
    curl: str


@dataclass(frozen=True)
class Section:
    name: str
    anchor: str
    operations: tuple[Operation, ...]


@dataclass(frozen=True)
class Field:
    name: str
    words: Words
    required: bool
    description: str


@dataclass(frozen=True)
class BodySchema:
    name: str
    description: str
    fields: tuple[Field, ...]


def read_reference(
    openapi: Schema, roles: Mapping[tuple[str, str], str], base: str
) -> tuple[tuple[Section, ...], tuple[BodySchema, ...]]:
    """Operations grouped by tag, what machines call last; then every shape they mention."""
    shapes: Schema = openapi.get("components", {}).get("schemas", {})
    sections: dict[str, list[Operation]] = {}
    for path, operations in openapi.get("paths", {}).items():
        for method in _METHODS:
            if (operation := operations.get(method)) is not None:
                tag = (operation.get("tags") or ["other"])[0]
                made = _operation(method.upper(), path, operation, shapes, roles, base)
                sections.setdefault(tag, []).append(made)
    for_people_first = sorted(sections.items(), key=lambda section: section[0] == _OF_MACHINES)
    return (
        tuple(Section(tag, _anchor("tag", tag), tuple(made)) for tag, made in for_people_first),
        tuple(_shape(name, shapes[name]) for name in sorted(_mentioned(sections, shapes))),
    )


def words_of(schema: Schema) -> Words:
    """A type as a person says it: `list of NodeView or null`."""
    if ref := schema.get("$ref"):
        name = _name(ref)
        return (Word(_title(name), name),)
    for either in ("oneOf", "anyOf"):
        if either in schema:
            return _joined([words_of(choice) for choice in schema[either]], " or ")
    if "enum" in schema:
        return (Word(" or ".join(json.dumps(value) for value in schema["enum"])),)
    kind = schema.get("type")
    if isinstance(kind, list):
        return (Word(" or ".join(kind)),)
    if kind == "array":
        return (Word("list of "), *words_of(schema.get("items") or {}))
    if kind == "object" and isinstance(schema.get("additionalProperties"), Mapping):
        return (Word("map of string to "), *words_of(schema["additionalProperties"]))
    return (Word(str(kind or "anything")),)


def example_of(schema: Schema, shapes: Schema, depth: int = 3) -> object:
    """A body somebody could send: defaults where there are some, else a value of the right kind."""
    if "$ref" in schema:
        return example_of(shapes.get(_name(schema["$ref"]), {}), shapes, depth)
    if "default" in schema:
        return schema["default"]
    for either in ("oneOf", "anyOf"):
        if either in schema:
            kinds = [choice for choice in schema[either] if choice.get("type") != "null"]
            return None if len(kinds) < len(schema[either]) else example_of(kinds[0], shapes, depth)
    match schema.get("type"):
        case "object" if depth and "properties" in schema:
            return {name: example_of(field, shapes, depth - 1) for name, field in schema["properties"].items()}
        case "object":
            return {"key": "value"} if "additionalProperties" in schema else {}
        case "array":
            return []
        case "integer" | "number":
            return 1
        case "boolean":
            return False
    return "…"


def _operation(
    method: str, path: str, operation: Schema, shapes: Schema, roles: Mapping[tuple[str, str], str], base: str
) -> Operation:
    role = roles.get((method, path), "")
    body = _content(operation.get("requestBody", {}))
    return Operation(
        anchor=_anchor(method.lower(), path),
        method=method,
        path=path,
        summary=operation.get("summary", ""),
        role=role,
        parameters=tuple(_parameter(found) for found in operation.get("parameters", ())),
        body=words_of(body) if body is not None else (),
        answers=tuple(_answers(operation)),
        curl=_curl(method, base + path, example_of(body, shapes) if body is not None else None, role),
    )


def _answers(operation: Schema) -> Iterator[ApiResponse]:
    for status, answer in operation.get("responses", {}).items():
        if status.startswith("2"):  # faults all have one form, said once at the top of the page
            content = _content(answer)
            yield ApiResponse(status, words_of(content) if content is not None else (Word("nothing"),))


def _content(holder: Schema) -> Schema | None:
    """The schema of the first form offered; what is no JSON is named by its media type."""
    for media_type, content in holder.get("content", {}).items():
        schema: Schema = content.get("schema", {})
        return schema if "json" in media_type else {"type": media_type}
    return None


def _parameter(found: Schema) -> Parameter:
    schema: Schema = found.get("schema", {})
    description = found.get("description") or schema.get("description") or ""
    return Parameter(found["name"], found["in"], words_of(schema), bool(found.get("required")), description)


def _curl(method: str, url: str, body: object, role: str) -> str:
    parts = ["curl"]
    if role and not role.startswith("nobody"):
        variable = "NODE_TOKEN" if "token" in role else "CORRAL_KEY"
        parts.append(f'-H "Authorization: Bearer ${variable}"')
    if method != "GET":
        parts.append(f"-X {method}")
    if body is not None:
        parts.append(f"--json {shlex.quote(json.dumps(body, ensure_ascii=False))}")
    return " ".join([*parts, shlex.quote(url)])


def _shape(name: str, schema: Schema) -> BodySchema:
    required = schema.get("required", ())
    fields = tuple(
        Field(field, words_of(shape), field in required, shape.get("description", ""))
        for field, shape in schema.get("properties", {}).items()
    )
    return BodySchema(_title(name), schema.get("description", ""), fields)


def _mentioned(sections: Mapping[str, list[Operation]], shapes: Schema) -> set[str]:
    waiting = [
        word.shape
        for operations in sections.values()
        for operation in operations
        for words in (operation.body, *(answer.words for answer in operation.answers))
        for word in words
    ]
    found: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name in shapes and name not in found:
            found.add(name)
            waiting.extend(w.shape for f in _shape(name, shapes[name]).fields for w in f.words)
    return found


def _joined(choices: list[Words], between: str) -> Words:
    """`null` last, whatever the order in the schema."""
    ordered = sorted(choices, key=lambda words: words == (Word("null"),))
    return tuple(word for at, words in enumerate(ordered) for word in ((Word(between), *words) if at else words))


def _name(ref: str) -> str:
    return ref.rsplit("/", 1)[-1]


def _title(name: str) -> str:
    """Shapes of the same name in two modules are told apart by a prefix nobody needs to read."""
    return name.rsplit("_", 1)[-1]


def _anchor(kind: str, text: str) -> str:
    return f"{kind}-" + "".join(c if c.isalnum() else "-" for c in text).strip("-")


# Least to most demanding: a route inside a guarded group may ask for more than the group does.
_WORDS: Mapping[Callable[..., Any], str] = {
    auth.anybody_known: "any key",
    auth.model_users: "inference or admin",
    auth.viewers: "viewer or admin",
    auth.admins: "admin",
    auth.gateways: "gateway",
}
_RANK = list(_WORDS.values())


def roles_needed(routes: Iterable[BaseRoute]) -> dict[tuple[str, str], str]:
    """By (method, path as OpenAPI writes it)."""
    needed = {}
    for route in routes:
        if isinstance(route, HTTPRoute):
            for handler in route.route_handlers:
                for method in handler.http_methods:
                    needed[str(method), route.path_format] = _words(route.path_format, handler.resolve_guards())
    return needed


def _words(path: str, guards: Iterable[object]) -> str:
    if path.startswith("/api/node/"):  # checked by the registry itself, against the node's row
        return "a join token" if path.endswith("/register") else "the node's own token"
    found = [words for guard, words in _WORDS.items() if any(getattr(g, "fn", g) is guard for g in guards)]
    return max(found, key=_RANK.index, default="nobody: open")
