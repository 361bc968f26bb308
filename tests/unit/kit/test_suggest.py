"""Suggestions for misspelt names."""

from __future__ import annotations

from corral.kit.humanize import did_you_mean, similar_names, suggest_names

KNOWN = ["smollm2-135m", "Qwen3-Coder", "qwen3-8b", "bert"]


def test_similar_names_come_before_names_that_contain_the_text() -> None:
    assert suggest_names("smolm2-135m", KNOWN) == ("smollm2-135m",)
    assert suggest_names("CODER", KNOWN) == ("Qwen3-Coder",)
    assert suggest_names("be", KNOWN) == ("bert",)  # similar; two letters are too few for a part of a name
    assert suggest_names("qwen3", KNOWN) == ("qwen3-8b", "Qwen3-Coder")
    assert suggest_names("qwen3", KNOWN, limit=1) == ("qwen3-8b",)


def test_a_very_long_name_is_not_compared() -> None:
    assert similar_names("a" * 60_000, ["a" * 60_000]) == []


def test_the_hint_of_an_error_message() -> None:
    assert did_you_mean("brt", KNOWN) == "; did you mean bert?"
    assert did_you_mean("zzz", KNOWN) == ""
