"""Reads the header of a GGUF file: the shape of the model, without its weights.

Files are untrusted: every count and length is bounded before it is used, and only the few numbers needed are kept.
Reading ends where the tokens begin: the shape comes before them, megabytes of vocabulary after. With `whole` the rest
is read, too: whether the file has a chat template stands behind the vocabulary. The controller estimates memory and
derives definitions from the header, the CLI reads the header of a file that it uploads; the caller opens the file.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from typing import BinaryIO

import msgspec

from corral.contract.codec import Message
from corral.kit.errors import Invalid

MAGIC = b"GGUF"
MAX_BYTES = 64 * 1024**2  # of metadata; the largest vocabularies take a third of that
MAX_KEYS = 65_536
MAX_KEY_LENGTH = 65_535  # the format's own bound
MAX_TEXT_LENGTH = 256  # that is kept
MAX_LIST_LENGTH = 4_096  # that is kept: one number per layer
TOKENS = "tokenizer.ggml.tokens"
CHAT_TEMPLATE = "tokenizer.chat_template"

Value = int | float | bool | str | tuple[int | float | bool, ...]

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _LIST = 8, 9
MAX_DEPTH = 4  # of lists of lists, which the format allows
_TRUNCATED = "the GGUF file ends in the middle of its header"


class Truncated(Invalid):
    """The header goes on where these bytes end."""


class GgufHeader(Message, frozen=True):
    """Values as the file has them; those who use them check their plausibility."""

    version: int
    architecture: str
    values: dict[str, Value] = msgspec.field(default_factory=dict)  # by the key without the architecture's name
    vocabulary: int = 0  # tokens
    name: str = ""  # general.name
    kind: str = ""  # general.type: model, adapter, mmproj
    chat_template: bool | None = None  # None: the header was not read so far

    def number(self, key: str) -> int:
        """0: missing or not a positive integer."""
        value = self.values.get(key, 0)
        return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0

    def numbers(self, key: str, count: int) -> tuple[int, ...]:
        """One for each of `count` layers, whether the file has a list or one number for all; empty: missing."""
        value = self.values.get(key)
        if isinstance(value, tuple):
            whole = [int(each) for each in value[:count] if isinstance(each, int)]  # no infinity is a number of heads
            return tuple(max(0, each) for each in whole) if len(whole) == count else ()
        return (self.number(key),) * count if self.number(key) else ()


def is_gguf(start: bytes) -> bool:
    return start[:4] == MAGIC


def read_header(file: BinaryIO, *, whole: bool = False) -> GgufHeader:
    """Read from the beginning of the file. Raises Invalid for a file that is not GGUF or has implausible lengths,
    Truncated if the file ends too early."""
    start = file.read(4)
    if start != MAGIC:
        raise Truncated(_TRUNCATED) if start and MAGIC.startswith(start) else Invalid("this is not a GGUF file")
    version_bytes = file.read(4)
    order = "<" if version_bytes[2:] == b"\0\0" else ">"  # versions are small numbers: the wrong order makes them huge
    reader = _HeaderReader(file, order)
    version = reader.unpack("I", version_bytes)
    if version not in (2, 3):
        raise Invalid(f"GGUF version {version} is not known here")
    reader.scalar("Q")  # tensors
    count = reader.scalar("Q")
    if count > MAX_KEYS:
        raise Invalid(f"{count} keys: no GGUF file has so many")
    values: dict[str, Value] = {}
    vocabulary = 0
    for _ in range(count):
        key = reader.text(MAX_KEY_LENGTH, keep=True)
        kind = reader.scalar("I")
        if key == TOKENS:
            vocabulary = reader.tokens(kind, skip=whole)
            if not whole:
                break
            continue
        value = reader.value(kind)
        if value is not None and _is_finite(value):
            values[key] = value
    return _header(version, values, vocabulary, whole=whole)


def _header(version: int, values: Mapping[str, Value], vocabulary: int, *, whole: bool) -> GgufHeader:
    architecture = values.get("general.architecture")
    if not isinstance(architecture, str) or not architecture:
        raise Invalid("the GGUF file does not name its architecture")
    prefix = f"{architecture}."
    own = {key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix)}
    return GgufHeader(
        version,
        architecture,
        own,
        vocabulary or GgufHeader(version, architecture, own).number("vocab_size"),
        name=_text_of(values, "general.name"),
        kind=_text_of(values, "general.type"),
        # A long text is not kept, its key is.
        chat_template=CHAT_TEMPLATE in values if whole else None,
    )


def _text_of(values: Mapping[str, Value], key: str) -> str:
    value = values.get(key)
    return value if isinstance(value, str) else ""


def _is_finite(value: Value) -> bool:
    """No shape has an infinite number in it, and JSON has no word for one."""
    members = value if isinstance(value, tuple) else (value,)
    return all(math.isfinite(each) for each in members if isinstance(each, float))


class _HeaderReader:
    """Reads values and stops after `MAX_BYTES`."""

    def __init__(self, file: BinaryIO, order: str) -> None:
        self._file = file
        self._order = order
        self._remaining = MAX_BYTES

    def unpack(self, kind: str, data: bytes) -> int:
        try:
            (value,) = struct.unpack(self._order + kind, data)
        except struct.error:
            raise Truncated(_TRUNCATED) from None
        return value  # type: ignore[no-any-return]

    def take(self, size: int) -> bytes:
        self._count(size)
        data = self._file.read(size)
        if len(data) != size:
            raise Truncated(_TRUNCATED)
        return data

    def skip(self, size: int) -> None:
        """May go past the end: the next read then fails."""
        self._count(size)
        self._file.seek(size, 1)

    def _count(self, size: int) -> None:
        self._remaining -= size
        if self._remaining < 0:
            raise Invalid(f"the header of the GGUF file is longer than {MAX_BYTES} bytes")

    def scalar(self, kind: str) -> int:
        return self.unpack(kind, self.take(struct.calcsize(self._order + kind)))

    def text(self, max_length: int, *, keep: bool) -> str:
        length = self.scalar("Q")
        if keep and length > max_length:
            raise Invalid(f"a key of {length} characters: no GGUF file has such")
        if not keep and length > max_length:
            self.skip(length)
            return ""
        return self.take(length).decode("utf-8", "replace")

    def value(self, kind: int, depth: int = 0) -> Value | None:
        """None: it was skipped."""
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _TEXT:
            return self.text(MAX_TEXT_LENGTH, keep=False)
        if kind == _LIST and depth < MAX_DEPTH:
            return self._list(depth)
        raise Invalid(f"the GGUF file has a value of unknown kind {kind}")

    def tokens(self, kind: int, *, skip: bool) -> int:
        """The number of tokens. `skip`: go past them."""
        if kind != _LIST:
            raise Invalid("the tokens of the GGUF file are not a list")
        member = self.scalar("I")
        length = self.scalar("Q")
        if length > MAX_BYTES:
            raise Invalid(f"{length} tokens: no model has so many")
        if skip:
            self._members(member, length, depth=0)
        return length

    def _list(self, depth: int) -> tuple[int | float | bool, ...] | None:
        return self._members(self.scalar("I"), self.scalar("Q"), depth)

    def _members(self, kind: int, length: int, depth: int) -> tuple[int | float | bool, ...] | None:
        if kind in _SCALARS:
            size = struct.calcsize(self._order + _SCALARS[kind]) * length
            if length > MAX_LIST_LENGTH:
                self.skip(size)
                return None
            data = self.take(size)
            return struct.unpack(f"{self._order}{length}{_SCALARS[kind]}", data)
        if kind not in (_TEXT, _LIST):
            raise Invalid(f"the GGUF file has a list of unknown kind {kind}")
        for _ in range(length):  # each takes at least eight bytes of what may be read in all
            if kind == _TEXT:
                self.text(0, keep=False)
            else:
                self.value(_LIST, depth + 1)
        return None
