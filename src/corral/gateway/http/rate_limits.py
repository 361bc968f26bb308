"""Rate limits of a key: requests and tokens per minute, concurrent requests. Pure: the caller passes the time.

Each rate is a token bucket that fills evenly, so a minute's worth may be used at once. The tokens of a response are
known only at its end: they may overdraw the bucket, and the next request is refused until it has filled up again. Each
gateway counts by itself; the processes of one gateway count together (`processes/rate_limits.py`).
"""

from __future__ import annotations

from typing import NamedTuple

from corral.contract.view import KeyLimits

_MINUTE_S = 60.0


class Refusal(NamedTuple):
    what: str  # requests, tokens, concurrent
    limit: int
    retry_after_s: float


class _Bucket:
    __slots__ = ("_at", "_left", "limit")

    def __init__(self, limit: int, now: float) -> None:
        self.limit = limit
        self._left = float(limit)
        self._at = now

    def wait_s(self, amount: float, now: float) -> float:
        """Seconds until `amount` is available; 0: it is."""
        self._left = min(self.limit, self._left + (now - self._at) * self.limit / _MINUTE_S)
        self._at = now
        return 0.0 if self._left >= amount else (amount - self._left) * _MINUTE_S / self.limit

    def take(self, amount: float) -> None:
        self._left -= amount


class KeyLimiter:
    def __init__(self, limits: KeyLimits, now: float, *, busy_retry_s: float = 1.0) -> None:
        self.running = 0
        self._busy_retry_s = busy_retry_s
        self.change(limits, now)

    def change(self, limits: KeyLimits, now: float) -> None:
        """Apply new limits. The object stays: requests in flight end where they began."""
        self.limits = limits
        self._requests = _Bucket(limits.requests_per_min, now) if limits.requests_per_min else None
        self._tokens = _Bucket(limits.tokens_per_min, now) if limits.tokens_per_min else None

    def check(self, now: float) -> Refusal | None:
        """The limit that refuses a request now; None: it may begin."""
        # Both are asked in any case: what flows into a full bucket is lost only when it is asked.
        requests_s = self._requests.wait_s(1.0, now) if self._requests is not None else 0.0
        tokens_s = self._tokens.wait_s(1.0, now) if self._tokens is not None else 0.0
        limit = self.limits.concurrent
        if limit and self.running >= limit:
            return Refusal("concurrent", limit, self._busy_retry_s)
        if self._requests is not None and requests_s:
            return Refusal("requests", self._requests.limit, requests_s)
        if self._tokens is not None and tokens_s:
            return Refusal("tokens", self._tokens.limit, tokens_s)
        return None

    def begin(self) -> bool:
        """Count a request, after `check` returned None. False: another process was faster; check again."""
        self.running += 1
        if self._requests is not None:
            self._requests.take(1.0)
        return True

    def end(self, tokens: int) -> None:
        self.running -= 1
        if self._tokens is not None:
            self._tokens.take(tokens)


class Limiters:
    """The limiters by key. They outlive views, or every change of the fleet would fill the buckets."""

    def __init__(self) -> None:
        self._by_key: dict[str, KeyLimiter] = {}

    def of(self, key_id: str, limits: KeyLimits | None, now: float) -> KeyLimiter | None:
        if limits is None or not (limits.requests_per_min or limits.tokens_per_min or limits.concurrent):
            return None
        known = self._by_key.get(key_id)
        if known is None:
            known = self._by_key[key_id] = self.new_limiter(key_id, limits, now)
        elif known.limits != limits:
            known.change(limits, now)
        return known

    def new_limiter(self, key_id: str, limits: KeyLimits, now: float) -> KeyLimiter:
        return KeyLimiter(limits, now)

    def retain(self, key_ids: set[str]) -> None:
        """Remove all other keys. Their requests in flight end where they began."""
        for gone in self._by_key.keys() - key_ids:
            del self._by_key[gone]
