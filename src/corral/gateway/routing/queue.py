"""Requests that wait for a slot, or for a cold model, in a fair order by key. Pure.

Two keys with waiting requests get slots in turn, even if one has a hundred waiting requests and the other has one.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Waiter(Generic[T]):
    __slots__ = ("key_id", "on_served")

    def __init__(self, key_id: str, on_served: Callable[[T], None]) -> None:
        self.key_id = key_id
        self.on_served = on_served  # called once


class FairQueue(Generic[T]):
    def __init__(self) -> None:
        self.waiting = 0
        self._keys: OrderedDict[str, deque[Waiter[T]]] = OrderedDict()  # the next key first

    def add(self, key_id: str, on_served: Callable[[T], None]) -> Waiter[T]:
        waiter = Waiter(key_id, on_served)
        self._keys.setdefault(key_id, deque()).append(waiter)
        self.waiting += 1
        return waiter

    def serve(self, item: T) -> bool:
        """Give `item` to the next waiter; False: no request waits."""
        if not self._keys:
            return False
        key_id, waiters = self._keys.popitem(last=False)
        waiter = waiters.popleft()
        if waiters:
            self._keys[key_id] = waiters  # behind the other keys
        self.waiting -= 1
        waiter.on_served(item)
        return True

    def remove(self, waiter: Waiter[T]) -> None:
        """No effect if it was served already."""
        waiters = self._keys.get(waiter.key_id)
        if waiters is None or waiter not in waiters:
            return
        waiters.remove(waiter)
        self.waiting -= 1
        if not waiters:
            del self._keys[waiter.key_id]

    def serve_all(self, item: T) -> None:
        while self.serve(item):
            pass
