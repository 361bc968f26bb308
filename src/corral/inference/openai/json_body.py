"""Reading a client's JSON: each value as what it must be, or refused by its name. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from corral.inference.api_errors import Refused, bad

_INT32 = 2**31 - 1
# What is in a body becomes objects, and everybody else waits meanwhile: ten seconds for 32 MB of empty lists. Texts and
# pictures of that size are no trouble; in the longest texts there are some ten thousand of these marks.
_LARGE = 1024 * 1024
_MARKS = (b":", b"[", b"{")
_MOST_PARTS = 1_000_000
_MOST_VALUES = 8_000_000  # a list of samples is long, too


class Asked:
    """The object a client sent. A null counts as absent, as OpenAI's own servers have it."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values

    @classmethod
    def read(cls, body: bytes) -> Asked:
        if len(body) > _LARGE and (sum(map(body.count, _MARKS)) > _MOST_PARTS or body.count(b",") > _MOST_VALUES):
            words = f"The body has more than {_MOST_PARTS} lists, objects and fields, or {_MOST_VALUES} values."
            raise Refused(413, words, code="request_too_large")
        try:
            values = msgspec.json.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise Refused(400, f"The body is not JSON: {error}.") from error
        if not isinstance(values, dict):
            raise Refused(400, "The body must be a JSON object.")
        return cls(values)

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None

    def get(self, key: str) -> Any:
        return self.values.get(key)

    def text(self, key: str, default: str = "") -> str:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise bad(key, f"{key} must be a string.")
        return value

    def flag(self, key: str) -> bool:
        value = self.values.get(key)
        if value is None or isinstance(value, bool):
            return bool(value)
        raise bad(key, f"{key} must be true or false.")

    def whole(self, key: str) -> int | None:
        value = self.values.get(key)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not -_INT32 - 1 <= value <= _INT32:
            raise bad(key, f"{key} must be a whole number.")
        return value

    def number(self, key: str) -> float | None:
        value = self.values.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise bad(key, f"{key} must be a number.")
        return float(value)

    def texts(self, key: str) -> list[str]:
        """A string, or a list of them."""
        value = self.values.get(key)
        if value is None:
            return []
        listed = [value] if isinstance(value, str) else value
        if not isinstance(listed, list) or not all(isinstance(item, str) for item in listed):
            raise bad(key, f"{key} must be a string or a list of strings.")
        return list(listed)

    def mapping(self, key: str) -> dict[str, Any]:
        value = self.values.get(key)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise bad(key, f"{key} must be an object.")
        return value
