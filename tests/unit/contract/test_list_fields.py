"""`client/list_fields.py` says what the messages of the contract say."""

from __future__ import annotations

import types
import typing
from typing import Any

import msgspec
import pytest

from corral.client.list_fields import FIELDS
from corral.contract.admin import NodeView, OperationNodeView, OperationView
from corral.contract.catalogue import ModelView, ScheduleView
from corral.contract.codec import Message
from corral.contract.hardware import Device
from corral.contract.receipts import RequestView

KINDS = (Device, NodeView, ScheduleView, ModelView, OperationNodeView, OperationView, RequestView)
_SIGNS = {str: "", int: "#", float: "~", bool: "?"}


def written(kind: type[Message]) -> str:
    fields = msgspec.structs.fields(kind)
    return " ".join(_name(field.name, field.encode_name) + _sign(field.type) for field in fields)


def _name(name: str, wire: str) -> str:
    return name if name == wire else f"{wire}={name}"


def _sign(kind: Any) -> str:
    if kind in _SIGNS:
        return _SIGNS[kind]
    inside = typing.get_args(kind)
    match typing.get_origin(kind):
        case origin if origin is dict:
            return "{}"
        case origin if origin is tuple:
            return f"[{inside[0].__name__}]" if issubclass(inside[0], Message) else "[]"
        case types.UnionType:
            return f"({inside[0].__name__})" if issubclass(inside[0], Message) else "|"
    raise AssertionError(f"no sign for {kind}")


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_the_fields_are_those_of_the_message(kind: type[Message]) -> None:
    expected = written(kind)
    assert FIELDS[kind.__name__] == expected, f"write this for {kind.__name__} into client/list_fields.py: {expected}"
