"""Values that cannot be meant: each command says what to give instead, and asks no fleet."""

from __future__ import annotations

import pytest

from tests.integration.cli.conftest import Corral
from tests.support.scripted_fleet import node


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("nodes", "budget", "barn", "-5GiB"), "is a negative number"),
        (("nodes", "budget", "barn", ""), "the amount is empty"),
        (("nodes", "max-replicas", "barn", "-1"), "is a negative number"),
        (("nodes", "max-replicas", "barn", "1001"), "1<=x<=1000"),
        (("keys", "create", "x", "--expires", "99999999d"), "at most ten years"),
        (("keys", "create", ""), "the name is empty"),
        (("token", "create", "--expires", "99999999d"), "at most ten years"),
    ],
)
def test_they_are_refused_in_words(corral: Corral, words: tuple[str, ...], said: str) -> None:
    corral.fleet.nodes = [node("barn")]
    ran = corral(*words)
    assert (ran.code, ran.out) == (2, ""), ran.err
    assert said in ran.err
    assert not [call for call in corral.fleet.calls if call[0] != "GET"]
