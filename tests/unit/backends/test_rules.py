"""Folding rules: the last word counts, and an upgrade never installs."""

from __future__ import annotations

import random
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from corral.controller.backends.rules import Unwanted, Wanted, fold, without_overruled
from corral.store.records import BackendRequest, BackendRule, RuleOrigin, Scope, ScopeKind, Want

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)

ALL = Scope(ScopeKind.ALL)
FAST = Scope(ScopeKind.SELECTOR, "tier=fast")
ONE = Scope(ScopeKind.NODE, "n1")


def rule(
    generation: int, want: str, target: str = "", scope: Scope = ALL, origin: str = "person", *excluded: str
) -> BackendRule:
    return BackendRule(
        generation=generation,
        operation_id=f"op{generation}",
        scope_kind=scope.kind,
        scope_value=scope.value,
        backend="vllm",
        want=Want(want),
        target=target,
        created_at=NOON,
        request=BackendRequest("vllm"),
        origin=RuleOrigin(origin),
        excluded=excluded,
    )


def folded(*rules: BackendRule, node: str = "n1", installed: bool = False, **labels: str) -> Wanted | Unwanted | None:
    there = frozenset({"vllm"}) if installed else frozenset[str]()
    return fold(rules, node_id=node, labels=labels, installed=there).get("vllm")


def test_what_no_rule_names_is_unmanaged() -> None:
    assert folded() is None
    assert folded(installed=True) is None


def test_present_sets_and_absent_clears() -> None:
    assert folded(rule(1, "present", "t1")) == Wanted("t1", 1, "op1")
    assert folded(rule(1, "present", "t1"), rule(2, "absent")) == Unwanted(2, "op2")
    assert folded(rule(1, "absent"), rule(2, "present", "t2")) == Wanted("t2", 2, "op2")


def test_an_upgrade_changes_only_what_is_wanted_or_installed() -> None:
    assert folded(rule(1, "upgraded", "t1")) is None
    assert folded(rule(1, "upgraded", "t1"), installed=True) == Wanted("t1", 1, "op1", upgraded=True)
    assert folded(rule(1, "present", "t1"), rule(2, "upgraded", "t2")) == Wanted("t2", 2, "op2", upgraded=True)
    assert folded(rule(1, "absent"), rule(2, "upgraded", "t2"), installed=True) == Unwanted(1, "op1")


def test_rollback_is_a_new_generation_with_the_previous_target() -> None:
    rules = [rule(1, "present", "old"), rule(2, "upgraded", "new"), rule(3, "present", "old")]
    assert folded(*rules) == Wanted("old", 3, "op3")


def test_withdrawing_a_rule_brings_back_what_held_before() -> None:
    rules = [rule(1, "present", "t1"), rule(2, "absent")]
    assert folded(*rules[:1]) == Wanted("t1", 1, "op1")


def test_scopes() -> None:
    assert folded(rule(1, "present", "t1", FAST), tier="fast") == Wanted("t1", 1, "op1")
    assert folded(rule(1, "present", "t1", FAST), tier="slow") is None
    assert folded(rule(1, "present", "t1"), rule(2, "absent", scope=ONE)) == Unwanted(2, "op2")
    assert folded(rule(1, "present", "t1"), rule(2, "absent", scope=ONE), node="n2") == Wanted("t1", 1, "op1")


def test_a_node_taken_out_of_a_rule_keeps_what_held_before() -> None:
    rules = [rule(1, "present", "t1"), rule(2, "absent", "", ALL, "person", "n1")]
    assert folded(*rules) == Wanted("t1", 1, "op1")
    assert folded(*rules, node="n2") == Unwanted(2, "op2")


def test_where_a_person_said_absent_a_load_does_not_bring_it_back() -> None:
    assert folded(rule(1, "absent", scope=ONE), rule(2, "present", "t", ONE, "load")) == Unwanted(1, "op1")
    assert folded(rule(1, "present", "t", ONE, "load")) == Wanted("t", 1, "op1")


@given(st.permutations([rule(1, "present", "a"), rule(2, "upgraded", "b"), rule(3, "absent"), rule(4, "present", "c")]))
def test_the_order_in_which_rules_are_read_does_not_matter(rules: list[BackendRule]) -> None:
    random.Random(0).shuffle(rules)
    assert folded(*rules) == Wanted("c", 4, "op4")


@st.composite
def histories(draw: st.DrawFn) -> list[BackendRule]:
    count = draw(st.integers(0, 6))
    return [
        rule(
            number,
            draw(st.sampled_from(["present", "absent", "upgraded"])),
            f"t{number}",
            draw(st.sampled_from([ALL, FAST, ONE])),
            draw(st.sampled_from(["person", "load"])),
            *draw(st.lists(st.sampled_from(["n1", "n2"]), max_size=1)),
        )
        for number in range(1, count + 1)
    ]


@given(histories(), st.sampled_from(["n1", "n2"]), st.sampled_from(["fast", "slow"]), st.booleans())
def test_leaving_out_the_overruled_changes_nothing(rules: list[BackendRule], node: str, tier: str, there: bool) -> None:
    kept = without_overruled(rules)
    assert folded(*kept, node=node, installed=there, tier=tier) == folded(*rules, node=node, installed=there, tier=tier)


def test_a_word_for_all_nodes_ends_the_earlier_ones() -> None:
    rules = [rule(1, "present", "a"), rule(2, "absent", scope=ONE), rule(3, "upgraded", "b"), rule(4, "absent")]
    assert [kept.generation for kept in without_overruled(rules)] == [4]
    assert [kept.generation for kept in without_overruled(rules[:3])] == [1, 2, 3]


@pytest.mark.parametrize("want", ["present", "absent", "upgraded"])
def test_a_rule_for_another_backend_changes_nothing(want: str) -> None:
    other = structs.replace(rule(9, want, "x"), backend="llama-cpp")
    assert folded(rule(1, "present", "t1"), other) == Wanted("t1", 1, "op1")
