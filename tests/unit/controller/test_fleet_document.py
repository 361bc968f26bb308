"""A fleet's file, read; what differs, in words; what rules come to."""

from __future__ import annotations

from typing import Any

import pytest

from corral.controller.fleetfile.differences import differences
from corral.controller.fleetfile.document import WantedBackend, read_fleet
from corral.controller.fleetfile.export import wanted_backends
from corral.kit.errors import Invalid
from corral.store.records import BackendRequest, BackendRule
from tests.integration.store.rows import a_rule

WHOLE = """
labels: {barn: {tier: fast, rack: 7, ssd: true}}
backends:
  - llama-cpp
  - {backend: vllm, selector: tier=fast}
models:
  - smollm2-135m
  - {model: localai@qwen, name: q, overrides: {f16: true}}
  - {name: mine, backend: vllm, context_size: 512}
schedules:
  - {model_name: mine, min_replicas: 2, node_selector: {tier: fast}}
"""


def test_a_file_is_read_whole() -> None:
    read = read_fleet(WHOLE)
    assert read.labels == {"barn": {"tier": "fast", "rack": "7", "ssd": "true"}}
    assert read.backends == (WantedBackend("llama-cpp"), WantedBackend("vllm", selector="tier=fast"))
    assert [(each.model, each.name, each.overrides, each.definition.get("context_size")) for each in read.models] == [
        ("smollm2-135m", "", {}, None),
        ("localai@qwen", "q", {"f16": True}, None),
        ("", "", {}, 512),
    ]
    assert [(each.model_name, each.min_replicas, each.node_selector) for each in read.schedules] == [
        ("mine", 2, {"tier": "fast"})
    ]
    assert read_fleet("").models == ()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model: []", "'model' is none of labels"),
        ("models: {}", "models is a list"),
        ("models: [a]\nmodels: [b]", "the key 'models' is repeated"),
        ("models: [a]\n---\nschedules: []", "second document"),
        ("schedules: [{model_name: a, min_replicas: 1}, {model_name: a}]", "schedules, entry 2: a has one above"),
        ("models: [a, {name: b, backend: c}, {model: x, name: a}]", "models, entry 3: there is a above"),
        ("- a", "entry must be a mapping"),
        ("models: [{name: a, context_size: x}]", "models, entry 1: context_size"),
        ("models: [{model: a, context_size: 1}]", "goes into overrides"),
        ("models: [7]", "models, entry 1"),
        ("backends: [{backend: a, node: b, selector: c}]", "not both"),
        ("backends: [{node: a}]", "say which"),
        ("backends: [{backend: a, nodes: b}]", "what 'nodes' means"),
        ("schedules: [{model_name: a, min_replicas: 3, max_replicas: 1}]", "schedules, entry 1: min_replicas"),
        ("schedules: [{min_replicas: 3}]", "needs a name"),
        ("labels: {a: [b]}", "labels of a"),
        ("labels: {a: {'': b}}", "no key"),
        ("labels: {a: {b: {c: d}}}", "b is a text"),
        ("labels: [", "not YAML"),
    ],
)
def test_what_cannot_be_meant_is_told_with_its_place(text: str, words: str) -> None:
    with pytest.raises(Invalid, match=words):
        read_fleet(text)


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n"])
def test_an_empty_file_is_not_taken_for_the_wish_to_have_nothing(text: str) -> None:
    with pytest.raises(Invalid, match=r"is empty.*`models: \[\]`"):
        read_fleet(text, prune=True)
    assert read_fleet("models: []", prune=True).models == ()


def test_differences_are_lines() -> None:
    before = {"a": 1, "p": {"t": 0.2, "gone": "x"}, "l": [1], "s": True}
    after = {"a": 1, "p": {"t": 0.5, "new": ""}, "l": [1, 2], "s": 1, "long": "y" * 200}
    assert differences(before, after) == (
        "l: [1] → [1,2]",
        "+ long: " + "y" * 79 + "…",
        "- p.gone: x",
        '+ p.new: ""',
        "p.t: 0.2 → 0.5",
        "s: true → 1",
    )
    assert differences(before, before) == ()


def rule(generation: int, want: str, scope: str = "all", value: str = "", **more: Any) -> BackendRule:
    return a_rule(
        generation=generation, want=want, scope_kind=scope, scope_value=value, request=BackendRequest("vllm"), **more
    )


NAMES = {"n1": "barn"}


@pytest.mark.parametrize(
    ("rules", "wanted"),
    [
        ([rule(1, "present")], [WantedBackend("vllm")]),
        ([rule(1, "present"), rule(2, "absent")], []),
        ([rule(2, "present"), rule(1, "absent")], [WantedBackend("vllm")]),
        ([rule(1, "present"), rule(2, "upgraded")], [WantedBackend("vllm")]),
        ([rule(1, "present", "node", "n1"), rule(2, "absent")], []),
        ([rule(1, "present", "node", "n1")], [WantedBackend("vllm", node="barn")]),
        ([rule(1, "present", "node", "gone")], []),
        ([rule(1, "present", "selector", "a=b"), rule(2, "absent", "selector", "a=b")], []),
        ([rule(1, "present", origin="load")], []),
        (
            [rule(1, "present"), rule(2, "present", "selector", "a=b")],
            [WantedBackend("vllm"), WantedBackend("vllm", selector="a=b")],
        ),
    ],
)
def test_what_people_want_in_the_end(rules: list[BackendRule], wanted: list[WantedBackend]) -> None:
    assert wanted_backends(rules, NAMES) == wanted
