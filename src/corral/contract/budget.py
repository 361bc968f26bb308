"""The VRAM budget: how much of a node's GPU memory may be used, as people write it
(docs/reference/wire/budgets-and-labels.md#vram-budget).

    (empty), 0, 0%              no budget
    80%, 0.8, 1                 a share of what the node has; never more than all of it
    12GB, 12 GiB, 512mb, 900B   an amount: KB MB GB TB count in 1000s, KiB MiB GiB TiB in 1024s, in any case
    12000000000                 a bare whole number above 1 is bytes

Pure. A worker's bad value means "no cap" and an admin's is refused: that difference is the caller's.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import assert_never

_UNITS = {
    "b": 1,
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", start=1)},
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", start=1)},
}
_BUDGET = re.compile(r"(?P<number>[0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*(?P<unit>%|[a-z]*)")
# A number anybody means fits; text of a megabyte would otherwise be turned into an integer of a megabyte.
_LONGEST = 64
_LARGEST = 1024**5  # no machine has a pebibyte of VRAM: such a value is a slip
_EXAMPLES = "give one such as 80%, 0.8, 12GB, 12GiB or a number of bytes"


@dataclass(frozen=True, slots=True)
class NoBudget:
    """All of it may be used."""


@dataclass(frozen=True, slots=True)
class Share:
    """A fraction in (0, 1] of what the node has. Exact, so that 29 % of 100 is 29."""

    of_total: Fraction


@dataclass(frozen=True, slots=True)
class Amount:
    """A number of bytes above 0; it may be more than the node has."""

    size_bytes: int


Budget = NoBudget | Share | Amount


def parse_budget(text: str) -> Budget:
    """Raises ValueError with a sentence a person can act on."""
    cleaned = text.strip().lower()
    if not cleaned:
        return NoBudget()
    found = _BUDGET.fullmatch(cleaned) if len(cleaned) <= _LONGEST else None
    if found is None:
        raise ValueError(f"{_shown(text)} is not a VRAM budget; {_EXAMPLES}")
    number, unit = Fraction(found["number"].rstrip(".")), found["unit"]
    if unit == "%":
        return _share(number / 100, text)
    if unit in _UNITS:
        return _amount(number * _UNITS[unit], text)
    if unit:
        raise ValueError(f"{_shown(text)} has an unknown unit {unit!r}; {_EXAMPLES}")
    return _bare(number, text)


def _bare(number: Fraction, text: str) -> Budget:
    if number <= 1:
        return _share(number, text)
    if number.denominator != 1:
        raise ValueError(f"{_shown(text)} is neither a share of at most 1 nor a whole number of bytes; {_EXAMPLES}")
    return _amount(number, text)


def _share(fraction: Fraction, text: str) -> Budget:
    if fraction > 1:
        raise ValueError(f"{_shown(text)} is more than all of the VRAM; give at most 100%")
    return Share(fraction) if fraction else NoBudget()


def _amount(size: Fraction, text: str) -> Budget:
    whole = int(size)
    if whole > _LARGEST:
        raise ValueError(f"{_shown(text)} is more than 1 PiB, which no machine has; {_EXAMPLES}")
    return Amount(whole) if whole else NoBudget()


def _shown(text: str) -> str:
    return repr(text if len(text) <= _LONGEST else text[:_LONGEST] + "…")


def ceiling_bytes(budget: Budget, total_vram: int) -> int | None:
    """The most that may be used on a node with this much; None where there is no budget. Never above the total."""
    match budget:
        case NoBudget():
            return None
        case Share(of_total):
            return int(total_vram * of_total)
        case Amount(size_bytes):
            return min(size_bytes, total_vram)
        case _:
            assert_never(budget)


def capped(available: int | None, ceiling: int | None) -> int | None:
    """What may be handed out of `available`. Unknown stays unknown: a ceiling says nothing about use."""
    if available is None or ceiling is None:
        return available
    return min(available, ceiling)
