"""Requests that wait for a slot, or for a cold model: bounded, served fairly by key. No clock and no loop in here.

A key with a hundred waiting requests gets every second slot beside a key with one, not ninety-nine of a hundred.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Waiter(Generic[T]):
    __slots__ = ("gave", "key_id")

    def __init__(self, key_id: str, gave: Callable[[T], None]) -> None:
        self.key_id = key_id
        self.gave = gave  # told once, when it is served


class FairQueue(Generic[T]):
    def __init__(self) -> None:
        self.waiting = 0
        self._keys: OrderedDict[str, deque[Waiter[T]]] = OrderedDict()  # the one to be served next first

    def add(self, key_id: str, gave: Callable[[T], None]) -> Waiter[T]:
        waiter = Waiter(key_id, gave)
        self._keys.setdefault(key_id, deque()).append(waiter)
        self.waiting += 1
        return waiter

    def serve(self, what: T) -> bool:
        """Give it to the next; False when nobody waits."""
        if not self._keys:
            return False
        key_id, waiters = self._keys.popitem(last=False)
        waiter = waiters.popleft()
        if waiters:
            self._keys[key_id] = waiters  # behind the others
        self.waiting -= 1
        waiter.gave(what)
        return True

    def leave(self, waiter: Waiter[T]) -> None:
        """Harmless when it was served."""
        waiters = self._keys.get(waiter.key_id)
        if waiters is None or waiter not in waiters:
            return
        waiters.remove(waiter)
        self.waiting -= 1
        if not waiters:
            del self._keys[waiter.key_id]

    def serve_all(self, what: T) -> None:
        while self.serve(what):
            pass
