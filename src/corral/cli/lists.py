"""The lists that are printed most, without what only other commands need: click, asyncio, msgspec and the messages take
three times as long to import as these commands to run.

It answers the plain case: these words, these options, a fleet that answers. In every other case, and after every error,
`print_list` returns None, and the whole command does the same again and says what is wrong. Rows and headings are those
of the commands; the fields that an answer leaves out come from `client/list_fields.py`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from corral.client.endpoint import Endpoint

_ZEROS: Mapping[str, Any] = {"": "", "#": 0, "~": 0.0, "?": False, "{": {}}
_NEWEST = 50  # requests
_OPERATIONS = 1000  # on one page
_CONNECTION = ("--url", "--key", "--ca", "--context")


class List(NamedTuple):
    path: str
    inside: str  # name of the field that has the rows; empty: the answer is the rows
    kind: str  # of the rows, in FIELDS; empty: as they come
    table: Callable[[Sequence[Any]], tuple[Sequence[str], Sequence[Sequence[str]], str]]
    flags: Mapping[str, str] = {}  # options without a value, as queries
    filters: Mapping[str, str] = {}  # options with a value, as names of queries; empty: a field of the rows
    only: tuple[str, str] = ("", "")  # rows whose field has this value; an empty name: all
    is_narrowed: bool = False  # no rows: the whole command says why


def _nodes(rows: Sequence[Any]) -> tuple[Sequence[str], Sequence[Sequence[str]], str]:
    from corral.cli.nodes import text

    return text.COLUMNS, [text.row(each) for each in rows], text.NO_NODES


def _models(rows: Sequence[Any]) -> tuple[Sequence[str], Sequence[Sequence[str]], str]:
    from corral.cli.models import text

    return text.COLUMNS, [text.model_row(each) for each in rows], text.NO_MODELS


def _replicas(rows: Sequence[Any]) -> tuple[Sequence[str], Sequence[Sequence[str]], str]:
    from corral.cli.models import text

    return text.REPLICA_COLUMNS, [text.replica_row(each) for each in rows], text.NO_REPLICAS


def _operations(rows: Sequence[Any]) -> tuple[Sequence[str], Sequence[Sequence[str]], str]:
    from corral.cli.operations import text

    return text.COLUMNS, [text.row(each) for each in rows], text.NO_OPERATION


def _requests(rows: Sequence[Any]) -> tuple[Sequence[str], Sequence[Sequence[str]], str]:
    from corral.cli.fleet import request_text

    return request_text.COLUMNS, [request_text.row(each) for each in rows], request_text.NO_REQUESTS


NODES = List("/api/nodes", "", "NodeView", _nodes, filters={"--status": ""})
MODELS = List("/api/models", "", "ModelView", _models)
REPLICAS = List("/api/nodes/models", "", "", _replicas)
OPERATIONS = List(
    f"/api/operations?limit={_OPERATIONS}",
    "operations",
    "OperationView",
    _operations,
    flags={"--all": "&rows=false&all=true"},
)
OPERATION_COUNTS = OPERATIONS._replace(path=f"{OPERATIONS.path}&rows=false")
REQUESTS = List(
    f"/api/requests?limit={_NEWEST}",
    "requests",
    "RequestView",
    _requests,
    flags={"--failed": "&failed=true"},
    filters={"--model": "model", "--node": "node", "--by": "key"},
)
LISTS = {
    ("nodes", "list"): NODES,
    ("models", "list"): MODELS,
    ("models", "replicas"): REPLICAS,
    ("ps",): REPLICAS,
    ("ops", "list"): OPERATIONS,
    ("requests",): REQUESTS,
}


def find_list(words: Sequence[str]) -> tuple[List, dict[str, str], bool] | None:
    """The list that the words mean, the options of the connection, and whether JSON is printed. Pure."""
    named = next((name for name in LISTS if tuple(words[: len(name)]) == name), None)
    if named is None:
        return None
    chosen = LISTS[named]
    given, narrowed, as_json, rest = {}, {}, False, list(words[len(named) :])
    while rest:
        word = rest.pop(0)
        if word == "--json":
            as_json = True
        elif word in chosen.flags:
            narrowed[word] = ""
        elif not rest or not rest[0] or rest[0].startswith("-") or not rest[0].isprintable():
            return None
        elif word in _CONNECTION:
            given[word[2:]] = rest.pop(0)
        elif word in chosen.filters:
            narrowed[word] = rest.pop(0)
        else:
            return None
    return _narrow(chosen, narrowed), given, as_json


def _narrow(chosen: List, options: Mapping[str, str]) -> List:
    from urllib.parse import quote

    for option, value in options.items():
        if option in chosen.flags:
            chosen = chosen._replace(path=chosen.path + chosen.flags[option], is_narrowed=True)
        elif query := chosen.filters[option]:
            chosen = chosen._replace(path=f"{chosen.path}&{query}={quote(value, safe='')}", is_narrowed=True)
        else:
            chosen = chosen._replace(only=(option[2:], value), is_narrowed=True)
    return chosen


def print_list(words: Sequence[str]) -> int | None:
    """Print the list, or the overview where there are no words, and return the exit code. None: nothing was printed,
    and the whole command has to run."""
    found = find_list(words)
    if found is None and words:
        return None
    from corral.cli.common.output import FAILED, INTERRUPTED, close_broken_stdout, replace_unencodable
    from corral.kit.errors import CorralError

    replace_unencodable()
    try:
        if found is not None:
            return _print(*found)
        from corral.cli.fleet.overview import show_overview

        return show_overview(None)
    except BrokenPipeError:
        close_broken_stdout()
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    except (CorralError, OSError):  # of the choice of the fleet: nothing is printed yet
        return None


def _print(chosen: List, given: Mapping[str, str], as_json: bool) -> int | None:
    """None: nothing was printed."""
    from corral.cli.common.output import DONE, FAILED, print_error, print_json, print_table
    from corral.client.endpoint import find_endpoint

    endpoint = find_endpoint(**given, env=os.environ)
    try:
        rows = read_rows(endpoint, chosen, dict if as_json else SimpleNamespace)
    except TimeoutError as error:
        from corral.client.errors import unreachable

        print_error(unreachable(endpoint.url, error, may_have_happened=False).message)
        return FAILED
    if rows is None:
        return None
    if as_json:
        print_json(rows)
        return DONE
    try:
        columns, cells, empty = chosen.table(rows)
    except (AttributeError, TypeError, ValueError):  # a value that only the messages could have refused
        return None
    print_table(columns, cells, empty=empty)
    return DONE


def read_rows(
    endpoint: Endpoint, chosen: List, make: Callable[..., Any], *, timeout_s: float = 15.0
) -> list[Any] | None:
    """Each row with all of its fields, as `make(**fields)`. None: see `print_list`. Raises TimeoutError."""
    import json

    from corral.client.blocking_get import get

    body = get(endpoint, chosen.path, timeout_s)
    try:
        answer: Any = json.loads(body) if body else None
        rows = answer[chosen.inside] if chosen.inside else answer
        if type(rows) is not list or not all(type(row) is dict for row in rows):
            return None
        if chosen.inside and answer.get("next") and len(rows) < _NEWEST:
            return None  # the rest is on another page
        field, value = chosen.only
        rows = [row for row in rows if row.get(field) == value] if field else rows
        if chosen.is_narrowed and not 0 < len(rows) < _OPERATIONS:
            return None  # nothing, or more on another page
        return [_complete(chosen.kind, row, make) for row in rows] if chosen.kind else rows
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def _complete(kind: str, row: Mapping[str, Any], make: Callable[..., Any]) -> Any:
    """The record with all of its fields under our names. Raises TypeError for a value of another type."""
    from corral.client.list_fields import fields_of

    return make(
        **{name: _value(sign, inside, row.get(wire), make) for wire, name, sign, inside in fields_of(kind)},
    )


def _value(sign: str, inside: str, value: Any, make: Callable[..., Any]) -> Any:
    if sign == "[":
        return [_complete(inside, each, make) for each in value or ()] if inside else list(value or ())
    if sign == "(":
        return None if value is None else _complete(inside, value, make)
    if sign == "|":
        return value
    default = _ZEROS[sign]
    if value is None:
        return default
    if sign == "~" and type(value) is int:
        return float(value)
    if type(value) is not type(default):
        raise TypeError(f"{value!r} is not a {type(default).__name__}")
    return value
