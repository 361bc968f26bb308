"""The VRAM budget (docs/reference/wire/budgets-and-labels.md#vram-budget)."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corral.contract.budget import Amount, NoBudget, Share, capped, ceiling_bytes, parse_budget

GB = 1000**3
GIB = 1024**3


@pytest.mark.parametrize("text", ["", "  ", "0", "0%", "0 %", "0.0%", "0b", "0GB", "0.0", "0.4B"])
def test_nothing_and_zero_mean_no_budget(text: str) -> None:
    assert parse_budget(text) == NoBudget()
    assert ceiling_bytes(parse_budget(text), 16 * GB) is None


@pytest.mark.parametrize(
    ("text", "share"),
    [
        ("80%", Fraction(4, 5)),
        (" 80 % ", Fraction(4, 5)),
        ("0.8", Fraction(4, 5)),
        (".5", Fraction(1, 2)),
        ("12.5%", Fraction(1, 8)),
        ("100%", Fraction(1)),
        ("1", Fraction(1)),
        ("1.0", Fraction(1)),
        ("1.", Fraction(1)),
    ],
)
def test_percentages_and_fractions_are_shares(text: str, share: Fraction) -> None:
    assert parse_budget(text) == Share(share)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("12GB", 12 * GB),
        ("12gb", 12 * GB),
        ("12 GB", 12 * GB),
        ("12000MB", 12 * GB),
        ("12000000KB", 12 * GB),
        ("0.012TB", 12 * GB),
        ("12000000000", 12 * GB),
        ("12000000000.0", 12 * GB),
        ("12000000000B", 12 * GB),
        ("12GiB", 12 * GIB),
        ("12gib", 12 * GIB),
        ("1.5GiB", 3 * GIB // 2),
        ("512MiB", 512 * 1024**2),
        ("3KiB", 3072),
        ("2TiB", 2 * 1024**4),
        ("2", 2),
        ("1B", 1),
    ],
)
def test_sizes_are_amounts_decimal_or_binary_in_any_case(text: str, size: int) -> None:
    assert parse_budget(text) == Amount(size)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("120%", "more than all"),
        ("100.1%", "more than all"),
        ("1.5", "neither a share of at most 1 nor a whole number of bytes"),
        ("-1", "not a VRAM budget"),
        ("-5%", "not a VRAM budget"),
        ("abc", "not a VRAM budget"),
        ("12ZB", "unknown unit 'zb'"),
        ("12G", "unknown unit 'g'"),
        ("%", "not a VRAM budget"),
        ("GB", "not a VRAM budget"),
        ("12 GB x", "not a VRAM budget"),
        ("1e9", "not a VRAM budget"),
        ("1_000", "not a VRAM budget"),
        ("nan", "not a VRAM budget"),
        ("inf", "not a VRAM budget"),
        ("١٢GB", "not a VRAM budget"),
        ("9" * 5000, "not a VRAM budget"),
        ("999999999TiB", "more than 1 PiB"),
        ("9" * 20, "more than 1 PiB"),
        ("-5GiB", "not a VRAM budget"),
    ],
)
def test_anything_else_is_refused_in_words(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words) as refused:
        parse_budget(text)
    assert len(str(refused.value)) < 250
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "total", "ceiling"),
    [
        ("80%", 10 * GB, 8 * GB),
        ("29%", 100, 29),
        ("12GB", 16 * GB, 12 * GB),
        ("64GB", 16 * GB, 16 * GB),
        ("100%", 16 * GB, 16 * GB),
        ("80%", 0, 0),
        ("12GB", 0, 0),
    ],
)
def test_the_ceiling_is_never_above_what_there_is(text: str, total: int, ceiling: int) -> None:
    assert ceiling_bytes(parse_budget(text), total) == ceiling


def test_available_is_capped_and_unknown_stays_unknown() -> None:
    assert capped(15, 12) == 12
    assert capped(5, 12) == 5
    assert capped(15, None) == 15
    assert capped(None, 12) is None
    assert capped(None, None) is None
    assert capped(0, 12) == 0


@settings(deadline=None)  # the machine may be busy
@given(st.text(max_size=80))
def test_any_text_is_a_budget_or_a_value_error(text: str) -> None:
    try:
        budget = parse_budget(text)
    except ValueError:
        return
    ceiling = ceiling_bytes(budget, 24 * GIB)
    assert ceiling is None or 0 <= ceiling <= 24 * GIB


@settings(deadline=None)  # the machine may be busy
@given(
    number=st.decimals(min_value=0, max_value=1000, places=3, allow_nan=False),
    unit=st.sampled_from(["B", "KB", "MB", "GB", "TB", "KiB", "MiB", "GiB", "TiB"]),
    total=st.integers(0, 2**63),
)
def test_sizes_scale_by_their_unit_and_ignore_case(number: object, unit: str, total: int) -> None:
    factor = {"K": 1, "M": 2, "G": 3, "T": 4}.get(unit[0], 0)
    exact = Fraction(str(number)) * (1024 if "i" in unit else 1000) ** factor
    budget = parse_budget(f"{number}{unit}")
    assert budget == parse_budget(f" {number} {unit.lower()} ")
    assert ceiling_bytes(budget, total) == (min(int(exact), total) if int(exact) else None)


@settings(deadline=None)  # the machine may be busy
@given(percent=st.integers(1, 100), total=st.integers(0, 2**63))
def test_percent_and_fraction_agree_and_are_exact(percent: int, total: int) -> None:
    assert ceiling_bytes(parse_budget(f"{percent}%"), total) == total * percent // 100
    assert parse_budget(f"{percent}%") == parse_budget(f"{percent / 100:.2f}")
