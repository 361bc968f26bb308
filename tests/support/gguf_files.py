"""Writes small GGUF files: a head with the keys given, and no weights."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

LLAMA: dict[str, Any] = {
    "general.architecture": "llama",
    "general.name": "a small llama",
    "llama.block_count": 32,
    "llama.context_length": 8192,
    "llama.embedding_length": 4096,
    "llama.attention.head_count": 32,
    "llama.attention.head_count_kv": 8,
    "llama.rope.freq_base": 500000.0,
}
TOKENS = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["<s>", "</s>", "a", "b"]}


def gguf(values: Mapping[str, Any], *, version: int = 3, order: str = "<", count: int | None = None) -> bytes:
    head = b"GGUF" + struct.pack(f"{order}IQQ", version, 0, len(values) if count is None else count)
    return head + b"".join(_text(key, order) + _value(value, order) for key, value in values.items())


def _text(text: str, order: str) -> bytes:
    data = text.encode()
    return struct.pack(f"{order}Q", len(data)) + data


def _value(value: Any, order: str) -> bytes:
    kind, data = _kind_and_data(value, order)
    return struct.pack(f"{order}I", kind) + data


def _kind_and_data(value: Any, order: str) -> tuple[int, bytes]:
    match value:
        case bool():
            return 7, struct.pack(f"{order}?", value)
        case int() if value < 0:
            return 11, struct.pack(f"{order}q", value)
        case int() if value < 2**32:
            return 4, struct.pack(f"{order}I", value)
        case int():
            return 10, struct.pack(f"{order}Q", value)
        case float():
            return 6, struct.pack(f"{order}f", value)
        case str():
            return 8, _text(value, order)
        case Sequence():
            members = [_kind_and_data(each, order) for each in value]
            kind = members[0][0] if members else 4
            return 9, struct.pack(f"{order}IQ", kind, len(members)) + b"".join(data for _, data in members)
    raise TypeError(f"GGUF has nothing for {value!r}")
