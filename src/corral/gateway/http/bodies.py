"""Budgets for request bodies in memory and on disk.

The gateway reads a body before it knows the model, and keeps the body until the response has ended, so that it can send
the body to another replica where the first one cannot be reached. Each body has its own limit; a budget limits all of
them together, or a few hundred clients with large bodies would take the memory, or the disk, of the whole gateway.
"""

from __future__ import annotations

from typing import NamedTuple

from corral.contract.http import Body, BodyTooLarge


class BudgetExceeded(Exception):
    """The bodies of other requests use the budget. It becomes free as they end."""


class ByteBudget:
    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0

    def reserve(self) -> Reservation:
        """An empty reservation, to grow as the body arrives."""
        return Reservation(self)


class BodyBudgets(NamedTuple):
    memory: ByteBudget
    disk: ByteBudget  # for multipart bodies


class Reservation:
    """The bytes of one request. Close it when the request is over."""

    __slots__ = ("_budget", "_bytes")

    def __init__(self, budget: ByteBudget) -> None:
        self._budget = budget
        self._bytes = 0

    def grow(self, size_bytes: int) -> None:
        budget = self._budget
        if budget.used_bytes + size_bytes > budget.limit_bytes:
            raise BudgetExceeded
        budget.used_bytes += size_bytes
        self._bytes += size_bytes

    def new_reservation(self) -> Reservation:
        """An empty one of the same budget."""
        return self._budget.reserve()

    def close(self) -> None:
        self._budget.used_bytes -= self._bytes
        self._bytes = 0


async def read_whole(body: Body, limit_bytes: int, reservation: Reservation) -> bytes:
    """Raises `BodyTooLarge` and `BudgetExceeded`; before it reads the body, where Content-Length is known."""
    if body.length is not None:
        if body.length > limit_bytes:
            raise BodyTooLarge(f"the body is over {limit_bytes} bytes")
        reservation.grow(body.length)
        return await body.read(limit_bytes)
    whole = bytearray()  # not a list of pieces: one of two bytes takes forty
    async for piece in body.chunks():
        if len(whole) + len(piece) > limit_bytes:
            raise BodyTooLarge(f"the body is over {limit_bytes} bytes")
        reservation.grow(len(piece))
        whole += piece
    return bytes(whole)
