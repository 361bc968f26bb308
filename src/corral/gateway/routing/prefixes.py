"""Which replica has served the prefix of a prompt (docs/reference/wire/routing.md#prefix-cache). Pure: the caller
passes the time.

A prompt is divided into blocks of 256 bytes. The hash of a block includes the hash of the block before it, so equal
hashes mean equal prefixes, and a flat table of hashes replaces a tree. The bytes are those of `messages` or `prompt` as
received: the gateway does not know the engines' tokens or templates.
"""

from __future__ import annotations

import math

import msgspec
import xxhash

BLOCK = 256
MAX_BLOCKS = 64  # 16 KiB
MAX_ENTRIES = 65_536  # per model

_hash = xxhash.xxh64_intdigest


class _Prompt(msgspec.Struct, gc=False):
    messages: msgspec.Raw = msgspec.Raw(b"")
    prompt: msgspec.Raw = msgspec.Raw(b"")
    input: msgspec.Raw = msgspec.Raw(b"")


_read = msgspec.json.Decoder(_Prompt).decode


def hash_blocks(body: bytes) -> list[int]:
    """The hashes of the prompt's whole blocks, in order; empty for a short prompt."""
    if len(body) < BLOCK:
        return []
    try:
        found = _read(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return []
    text = bytes(found.messages or found.prompt or found.input)
    chain: list[int] = []
    seed = 0
    for start in range(0, min(len(text) - BLOCK + 1, BLOCK * MAX_BLOCKS), BLOCK):
        seed = _hash(text[start : start + BLOCK], seed)
        chain.append(seed)
    return chain


class PrefixIndex:
    """For one model: which replica served which prefix last, and an estimate of what each has in its cache."""

    def __init__(self, *, ttl_s: float, half_life_s: float) -> None:
        self._ttl_s = ttl_s
        self._half_life_s = half_life_s
        self._decay = math.log(2) / half_life_s
        self._seen: dict[int, tuple[str, float]] = {}  # the oldest first
        self._weights: dict[str, tuple[float, float]] = {}  # by process: weight, and the time of this value

    def emptied(self) -> PrefixIndex:
        """A new one with the same times."""
        return PrefixIndex(ttl_s=self._ttl_s, half_life_s=self._half_life_s)

    def match(self, chain: list[int], candidates: dict[str, int], now: float) -> tuple[str, int] | None:
        """The process among `candidates` that has served the longest prefix, and its number of blocks."""
        seen, oldest = self._seen, now - self._ttl_s
        for depth in range(len(chain), 0, -1):
            entry = seen.get(chain[depth - 1])
            if entry is not None and entry[1] >= oldest and entry[0] in candidates:
                return entry[0], depth
        return None

    def observe(self, chain: list[int], process_id: str, now: float) -> None:
        seen = self._seen
        fresh = 0
        for block in chain:
            known = seen.pop(block, None)
            fresh += known is None or known[0] != process_id
            seen[block] = (process_id, now)
        if fresh:
            self._weights[process_id] = (self.weight(process_id, now) + fresh, now)
        if len(seen) > MAX_ENTRIES:
            self._shrink(now)

    def weight(self, process_id: str, now: float) -> float:
        weight, at = self._weights.get(process_id, (0.0, now))
        return weight * math.exp(self._decay * (at - now))

    def retain(self, process_ids: set[str]) -> None:
        """Remove all other processes: a process that was restarted has an empty cache."""
        if self._weights.keys() <= process_ids:
            return
        self._weights = {each: known for each, known in self._weights.items() if each in process_ids}
        self._seen = {block: entry for block, entry in self._seen.items() if entry[0] in process_ids}

    def _shrink(self, now: float) -> None:
        oldest = now - self._ttl_s
        live = [item for item in self._seen.items() if item[1][1] >= oldest]
        self._seen = dict(live[-MAX_ENTRIES // 2 :])
