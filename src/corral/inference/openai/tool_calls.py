"""Finds tool calls in plain text, for backends that do not parse their own output. Pure.

Two forms are common to nearly all models: `<tool_call>{"name": …, "arguments": …}</tool_call>`, any number of them, and
the bare JSON, one object or a list. Only calls of offered tools count; everything else is text.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

_OPENING, _CLOSING = "<tool_call>", "</tool_call>"


def could_be_call(text: str) -> bool:
    """Whether a text that begins like this may become a tool call."""
    begun = text.lstrip()
    return begun[:1] in ("", "{", "[") or begun.startswith(_OPENING[: len(begun)])


def find_calls(text: str, tools: Collection[str]) -> tuple[str, list[tuple[str, str]]]:
    """The remaining text, and the calls: name, and arguments as JSON text."""
    rest, tagged = _take_out(text)
    if tagged:
        found = [_call(_read(inner), tools) for inner in tagged]
        calls = [call for call in found if call is not None]
        if len(calls) == len(tagged):
            return rest.strip(), calls
        return text, []
    given = _read(text)
    listed = given if isinstance(given, list) else [given]
    found = [_call(each, tools) for each in listed]
    calls = [call for call in found if call is not None]
    return ("", calls) if calls and len(calls) == len(listed) else (text, [])


def _take_out(text: str) -> tuple[str, list[str]]:
    """The remaining text, and the content of the tags. Without a regular expression: backtracking could take hours for
    an unclosed tag followed by spaces."""
    left, inside, at = [], [], 0
    while (begin := text.find(_OPENING, at)) >= 0 and (end := text.find(_CLOSING, begin)) >= 0:
        left.append(text[at:begin])
        inside.append(text[begin + len(_OPENING) : end])
        at = end + len(_CLOSING)
    return "".join((*left, text[at:])), inside


def _read(text: str) -> object:
    try:
        return msgspec.json.decode(text.strip().encode())
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None


def _call(given: object, tools: Collection[str]) -> tuple[str, str] | None:
    if not isinstance(given, dict):
        return None
    inner = given.get("function")
    if isinstance(inner, dict):
        given = inner
    name = given.get("name") or (inner if isinstance(inner, str) else None)
    arguments = given.get("arguments", given.get("parameters", {}))
    if not isinstance(name, str) or name not in tools:
        return None
    return name, arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
