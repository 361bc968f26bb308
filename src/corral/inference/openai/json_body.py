"""The JSON body of a client's request: each value with its expected type, or an error that names the field. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from corral.inference.api_errors import ApiError, invalid_field

_INT32 = 2**31 - 1
# Decoding creates an object per value and blocks the event loop: ten seconds for 32 MB of empty lists. Texts and images
# of that size are harmless; the longest texts contain some ten thousand of these characters.
_LARGE = 1024 * 1024
_MARKS = (b":", b"[", b"{")
_MAX_PARTS = 1_000_000
_MAX_VALUES = 8_000_000  # a list of samples is long, too


class JsonBody:
    """The JSON object of a request. null counts as absent, as with OpenAI's servers."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values

    @classmethod
    def read(cls, body: bytes) -> JsonBody:
        if len(body) > _LARGE and (sum(map(body.count, _MARKS)) > _MAX_PARTS or body.count(b",") > _MAX_VALUES):
            words = f"The body has more than {_MAX_PARTS} lists, objects and fields, or {_MAX_VALUES} values."
            raise ApiError(413, words, code="request_too_large")
        try:
            values = msgspec.json.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ApiError(400, f"The body is not JSON: {error}.") from error
        if not isinstance(values, dict):
            raise ApiError(400, "The body must be a JSON object.")
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
            raise invalid_field(key, f"{key} must be a string.")
        return value

    def flag(self, key: str) -> bool:
        value = self.values.get(key)
        if value is None or isinstance(value, bool):
            return bool(value)
        raise invalid_field(key, f"{key} must be true or false.")

    def whole(self, key: str) -> int | None:
        value = self.values.get(key)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not -_INT32 - 1 <= value <= _INT32:
            raise invalid_field(key, f"{key} must be a whole number.")
        return value

    def number(self, key: str) -> float | None:
        value = self.values.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise invalid_field(key, f"{key} must be a number.")
        return float(value)

    def texts(self, key: str) -> list[str]:
        """A string, or a list of them."""
        value = self.values.get(key)
        if value is None:
            return []
        listed = [value] if isinstance(value, str) else value
        if not isinstance(listed, list) or not all(isinstance(item, str) for item in listed):
            raise invalid_field(key, f"{key} must be a string or a list of strings.")
        return list(listed)

    def numbers(self, key: str) -> list[float]:
        value = self.values.get(key)
        if value is None:
            return []
        if not isinstance(value, list):
            raise invalid_field(key, f"{key} must be a list of numbers.")
        return [JsonBody({key: item}).number(key) or 0.0 for item in value]

    def mapping(self, key: str) -> dict[str, Any]:
        value = self.values.get(key)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise invalid_field(key, f"{key} must be an object.")
        return value
