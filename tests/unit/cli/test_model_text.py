"""Models in words, and definitions as people write them."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from corral.cli.common import declare
from corral.cli.models import text as model_text
from corral.cli.models.replicas import schedule_of
from corral.contract.catalogue import ModelView, ScheduleView
from corral.kit.humanize import to_yaml


def schedule(**known: Any) -> ScheduleView:
    return ScheduleView(model_name="m", **known)


@pytest.mark.parametrize(
    ("known", "words"),
    [
        ({"min_replicas": 2}, "2–∞"),
        ({"min_replicas": 1, "max_replicas": 3}, "1–3"),
        ({"min_replicas": 2, "max_replicas": 2}, "2"),
        ({}, "as needed"),
        ({"spread_all": True}, "every node"),
        (
            {"min_replicas": 2, "max_replicas": 2, "unsatisfiable_until": "2026-01-01T00:00:00Z"},
            "2 (cannot be placed now)",
        ),
    ],
)
def test_how_many_are_wanted(known: dict[str, Any], words: str) -> None:
    assert model_text.wanted(schedule(**known)) == words


def test_rows_of_models() -> None:
    plain = ModelView(id="a", backend="vllm", origin="person", created_by="ann", ready=2)
    assert model_text.model_row(plain) == ("a", "vllm", "2", "", "", "ann", "")
    of_file = ModelView(id="b", alias="a", origin="file", source="17f5/b.yaml", disabled=True)
    assert model_text.model_row(of_file) == ("b", "", "", "", "", "file b.yaml", "alias of a, disabled")


def test_rows_of_replicas() -> None:
    row = {
        "model_name": "a",
        "node_name": "barn",
        "replica_index": 1,
        "state": "loaded",
        "process_state": "restarting",
        "in_flight": 3,
        "memory_bytes": 2 << 30,
        "devices": [0, 1],
        "last_used": "",
        "error": "killed",
    }
    shown = model_text.replica_row(row)
    assert shown == ("a", "barn", "1", "restarting", "3", "2.0 GiB", "0, 1", "never", "killed")
    leaving = {**row, "state": "unloading", "process_state": "ready", "error": "", "reason": "idle"}
    assert model_text.replica_row(leaving)[3::5] == ("unloading", "idle")
    unheard = {**row, "state": "loading", "process_state": "node offline"}
    assert model_text.replica_row(unheard)[3] == "node offline", "nobody knows whether it still loads"


def test_a_definition_comes_back_as_it_was_written() -> None:
    whole = {"b": 1, "template": {"chat": "line\nline\n"}, "name": "ä", "options": ["x:1"], "version": "1.10"}
    text = to_yaml(whole)
    assert text.startswith("name: ä\n")
    assert "chat: |\n    line\n    line\n" in text
    assert yaml.safe_load(text) == whole


def test_several_definitions_of_a_file() -> None:
    assert model_text.documents("name: a  # kept\n") == ["name: a  # kept\n"]
    assert [yaml.safe_load(each) for each in model_text.documents("- {name: a}\n- {name: b}\n")] == [
        {"name": "a"},
        {"name": "b"},
    ]
    assert model_text.documents("a: [") == ["a: ["]


def test_a_list_of_definitions_keeps_their_words() -> None:
    one, two = model_text.documents("- &x {name: on, version: 007, é: 1.10}\n- {<<: *x, name: b, name: c}\n")
    assert one == "{name: on, version: 007, é: 1.10}\n"
    assert two.count("name:") == 3, "that a key is said twice is for the controller to find"
    assert "version: 007" in two


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[]", "contains no definition"),
        ("- smollm2-135m\n", "entry 1 is not"),
        ("- {name: a}\n- [b]\n", "entry 2 is not"),
    ],
)
def test_what_is_no_definition_is_not_passed_over(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        model_text.documents(text)


def test_keys_that_are_set_and_taken_away() -> None:
    given = [
        "context_size=8192",
        "parameters.temperature=0.2",
        "options=[a, b]",
        "parameters.model=x y",
        "f16=true",
        "e=",
    ]
    assert model_text.changes_of(given, ["parallel", "template.chat"]) == {
        "context_size": 8192,
        "parameters": {"temperature": 0.2, "model": "x y"},
        "options": ["a", "b"],
        "f16": True,
        "e": "",
        "parallel": None,
        "template": {"chat": None},
    }
    for wrong in (["context_size"], ["=3"], ["a=1", "a.b=2"]):
        with pytest.raises(ValueError, match=r"KEY=VALUE|already has a value"):
            model_text.changes_of(wrong, [])


def test_a_number_takes_back_every_node() -> None:
    everywhere = schedule(spread_all=True, node_selector='{"tier":"fast"}')
    body = schedule_of("m", everywhere, 2, None, every_node=False, selector=None, policy=None)
    assert (body.spread_all, body.min_replicas, body.node_selector) == (False, 2, {"tier": "fast"})
    body = schedule_of("m", everywhere, None, None, every_node=False, selector="", policy="round_robin")
    assert (body.spread_all, body.node_selector, body.route_policy) == (True, {}, "round_robin")
    with pytest.raises(declare.BadParameter, match="two values of one label"):
        schedule_of("m", None, 1, None, every_node=False, selector="tier=fast,tier=slow", policy=None)


def test_a_selector_is_shown_as_it_is_asked_for() -> None:
    chosen = schedule(min_replicas=1, node_selector='{"tier":"fast","rack":"b2"}')
    told = dict(model_text.details(ModelView(id="m", schedule=chosen)))
    assert told["on nodes with"] == "rack=b2,tier=fast"
