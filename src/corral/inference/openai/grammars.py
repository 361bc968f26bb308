"""Converts `response_format` into a grammar for the backend's output (GBNF, llama.cpp's notation). Pure.

The grammar covers the structure of a JSON schema: objects with their properties in order, arrays, alternatives,
constants. Keywords that only narrow a value (`minimum`, `pattern`, `format`) are ignored. Keywords that change the
structure and cannot be expressed are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from corral.contract.codec import encode
from corral.inference.api_errors import ApiError, invalid_field
from corral.inference.openai.json_body import JsonBody

# Any JSON, with as little white space as a model needs.
_VALUES = r"""value ::= object | array | string | number | boolean | null
object ::= "{" ws ( pair ( "," ws pair )* )? "}" ws
pair ::= string ":" ws value
array ::= "[" ws ( value ( "," ws value )* )? "]" ws
string ::= "\"" ( [^"\\\x00-\x1f] | "\\" ( ["\\/bfnrt] | "u" hex hex hex hex ) )* "\"" ws
number ::= integral ( "." [0-9]+ )? ( [eE] [-+]? [0-9]+ )? ws
integer ::= integral ws
integral ::= "-"? ( "0" | [1-9] [0-9]* )
boolean ::= ( "true" | "false" ) ws
null ::= "null" ws
hex ::= [0-9a-fA-F]
ws ::= [ \t\n]?
"""
JSON_OBJECT = "root ::= object\n" + _VALUES
_KEPT = {"string", "number", "integer", "boolean", "null"}
_CANNOT = ("not", "if", "patternProperties", "prefixItems", "dependentSchemas", "propertyNames")
_MAX_RULES = 2000
_MAX_TYPES = 7


def grammar_of(body: JsonBody) -> str:
    """Empty if the client wants plain text. Raises ApiError for an unsupported format."""
    wanted = body.mapping("response_format")
    match wanted.get("type", "text"):
        case "text":
            return body.text("grammar")
        case "json_object":
            return JSON_OBJECT
        case "json_schema":
            given = wanted.get("json_schema")
            schema = given.get("schema") if isinstance(given, dict) else None
            if not isinstance(schema, dict):
                raise _cannot("json_schema.schema must be an object")
            return schema_grammar(schema)
    raise _cannot("its type must be text, json_object or json_schema")


def schema_grammar(schema: Mapping[str, Any]) -> str:
    return _Grammar(schema).written()


def _cannot(why: str) -> ApiError:
    return invalid_field("response_format", f"response_format: {why}.")


class _Grammar:
    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._schema = schema
        self._rules: dict[str, str] = {}
        self._refs: dict[str, str] = {}
        self._count = 0

    def written(self) -> str:
        try:
            root = self._of(self._schema)
        except RecursionError as error:
            raise _cannot("the schema is nested too deeply") from error
        rules = "".join(f"{name} ::= {body}\n" for name, body in self._rules.items())
        return f"root ::= {root}\n{rules}{_VALUES}"

    def _rule(self, body: str) -> str:
        name = self._named()
        self._rules[name] = body
        return name

    def _named(self) -> str:
        self._count += 1
        if self._count > _MAX_RULES:
            raise _cannot("the schema is too large")
        return f"r{self._count}"

    def _of(self, schema: object) -> str:
        """The rule for one value; returns its name."""
        if schema is True:
            return "value"
        if not isinstance(schema, Mapping):
            raise _cannot("a part of the schema is no object")
        if found := [key for key in _CANNOT if key in schema]:
            raise _cannot(f"{found[0]} cannot be held to")
        if "allOf" in schema:  # with one part: some tools write a reference with a description in this form
            parts = self._list(schema, "allOf")
            if len(parts) > 1:
                raise _cannot("allOf of several cannot be held to")
            return self._of(parts[0])
        if "$ref" in schema:
            return self._referred(schema["$ref"])
        if "const" in schema:
            return self._rule(_literal(schema["const"]))
        if "enum" in schema:
            return self._one_of([_literal(value) for value in self._list(schema, "enum")])
        for key in ("anyOf", "oneOf"):
            if key in schema:
                return self._one_of([self._of(each) for each in self._list(schema, key)])
        kind = schema.get("type")
        if isinstance(kind, list):
            if len(kind) > _MAX_TYPES:  # each type is combined with the rest of the schema
                raise _cannot(f"there are no more than {_MAX_TYPES} types")
            return self._one_of([self._of({**schema, "type": each}) for each in self._list(schema, "type")])
        return self._of_type(kind, schema)

    def _of_type(self, kind: object, schema: Mapping[str, Any]) -> str:
        if kind == "object" or (kind is None and "properties" in schema):
            return self._object(schema)
        if kind == "array" or (kind is None and "items" in schema):
            return self._array(schema)
        if isinstance(kind, str) and kind in _KEPT:
            return kind
        if kind is None:
            return "value"
        raise _cannot(f"there is no type {str(kind)[:40]!r}")

    def _object(self, schema: Mapping[str, Any]) -> str:
        properties = schema.get("properties") or {}
        if not isinstance(properties, Mapping):
            raise _cannot("properties must be an object")
        if not properties:
            return "object"
        required = schema.get("required") or []
        if not isinstance(required, list) or not all(isinstance(key, str) for key in required):
            raise _cannot("required must be a list of names")
        required = set(required)
        # From the last to the first: the rules for the following properties, with and without a comma, exist by then.
        after = first = ""
        for key, value in reversed(list(properties.items())):
            pair = f'{_literal(key)} ":" ws {self._of(value)}'
            with_comma, alone = f'"," ws {pair} {after}', f"{pair} {after}"
            if key not in required:
                with_comma, alone = _optional(with_comma, after), _optional(alone, first)
            after, first = self._rule(with_comma), self._rule(alone)
        return self._rule(f'"{{" ws {first} "}}" ws')

    def _array(self, schema: Mapping[str, Any]) -> str:
        item = self._of(schema.get("items", True))
        least = schema.get("minItems") or 0
        if not isinstance(least, int) or not 0 <= least <= 100:
            raise _cannot("minItems must be 0 to 100")
        if not least:
            return self._rule(f'"[" ws ( {item} ( "," ws {item} )* )? "]" ws')
        some = ' "," ws '.join([item] * least)
        return self._rule(f'"[" ws {some} ( "," ws {item} )* "]" ws')

    def _referred(self, ref: object) -> str:
        """The rule is named before the schema is read, because schemas may refer to themselves."""
        if not isinstance(ref, str) or not ref.startswith("#"):
            raise _cannot("$ref must point into the schema itself")
        if ref not in self._refs:
            found: Any = self._schema
            for word in ref.removeprefix("#").strip("/").split("/") if ref != "#" else ():
                found = found.get(word) if isinstance(found, Mapping) else None
            if found is None:
                raise _cannot(f"$ref {ref[:80]!r} points nowhere")
            self._refs[ref] = self._named()
            self._rules[self._refs[ref]] = self._of(found)
        return self._refs[ref]

    def _one_of(self, expressions: list[str]) -> str:
        return self._rule(" | ".join(expressions))

    def _list(self, schema: Mapping[str, Any], key: str) -> list[Any]:
        listed = schema[key]
        if not isinstance(listed, list) or not listed:
            raise _cannot(f"{key} must be a list that is not empty")
        return listed


def _optional(expression: str, otherwise: str) -> str:
    return f"{expression} | {otherwise}" if otherwise else f"( {expression} )?"


def _literal(value: object) -> str:
    """A JSON value as a literal of the grammar."""
    text = encode(value).decode().replace("\\", "\\\\").replace('"', '\\"')
    return f'"{text}" ws'
