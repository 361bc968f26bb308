"""Schedules given at start, and how a body comes to one."""

from __future__ import annotations

from pathlib import Path

import pytest

from corral.contract.catalogue import ScheduleBody
from corral.controller.models.schedules import next_schedule
from corral.controller.models.suggestions import misspelled_fields, unknown_model
from corral.controller.wiring.models import given_schedules
from corral.kit.errors import Invalid

FILE = """
- {model_name: a, replicas: all}
- {model_name: b, min_replicas: 1, max_replicas: 2, node_selector: {tier: fast}, route_policy: round_robin}
"""


def test_setting_and_file_together(tmp_path: Path) -> None:
    file = tmp_path / "schedules.yaml"
    file.write_text(FILE)
    found = {body.model_name: body for body in given_schedules('[{"model_name":"a","replicas":"auto"}]', file)}
    assert (found["a"].spread_all, found["b"].max_replicas, found["b"].node_selector) == (False, 2, {"tier": "fast"})
    assert [body.spread_all for body in given_schedules("", file)] == [True, False]
    assert given_schedules("", None) == ()


@pytest.mark.parametrize(("replicas", "spread"), [('"all"', True), ("true", True), ('""', False), ("false", False)])
def test_the_word_replicas(replicas: str, spread: bool) -> None:
    [body] = given_schedules(f'[{{"model_name":"a","replicas":{replicas}}}]', None)
    assert body.spread_all is spread


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "model-scheduling"),
        ('[{"model_name":"a","replicas":3}]', "min_replicas and max_replicas"),
        ('[{"model_name":"a","min_replicas":3,"max_replicas":1}]', "more than max_replicas"),
        ('[{"min_replicas":3}]', "needs a name"),
        ('[{"model_name":"a","min_replicas":"x"}]', "schedule 1"),
    ],
)
def test_what_cannot_be_meant_stops_the_start(text: str, words: str) -> None:
    with pytest.raises(Invalid, match=words):
        given_schedules(text, None)


def test_a_file_that_is_not_there_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match=r"model-scheduling-config: .*nowhere"):
        given_schedules("", tmp_path / "nowhere.yaml")


def test_what_is_left_out_stays_and_what_is_said_counts() -> None:
    first = next_schedule(None, ScheduleBody(model_name="a", route_policy="prefix_cache", min_prefix_match=0.5))
    kept = next_schedule(first, ScheduleBody(model_name="a", min_replicas=1))
    assert (kept.id, kept.route_policy, kept.min_prefix_match, kept.min_replicas) == (first.id, "prefix_cache", 0.5, 1)
    cleared = next_schedule(kept, ScheduleBody(model_name="a", route_policy="", min_prefix_match=0.0))
    assert (cleared.route_policy, cleared.min_prefix_match, cleared.min_replicas) == ("", 0.0, 0)


def test_an_unknown_model_is_reported_with_suggestions() -> None:
    known = ["smollm2-135m", "Qwen3-Coder", "qwen3-8b", "bert"]
    shows = "; `corral models list` and `corral models available` show which there are"
    assert unknown_model("zzz", known) == f"there is no model 'zzz'{shows}"
    assert unknown_model("qwen3", known) == "there is no model 'qwen3'; did you mean qwen3-8b, Qwen3-Coder?"
    silent = unknown_model("x", (), {"localai": "https://localai.test cannot be reached: no route to host"})
    assert silent.splitlines() == [
        f"there is no model 'x'{shows}",
        "the gallery localai could not be read: https://localai.test cannot be reached: no route to host",
    ]


def test_words_of_a_definition_that_are_nearly_ours() -> None:
    assert misspelled_fields(["name", "contxt_size", "while_loadin", "f16"]) == (
        "`contxt_size` means nothing to the fleet: was `context_size` meant?",
        "`while_loadin` means nothing to the fleet: was `while_loading` meant?",
    )
    of_engines = [
        "context_shift",
        "mmap",
        "mmlock",
        "flash_attention",
        "known_usecases",
        "overrides",
        "options",
        "stopwords",
    ]
    others = [
        "batch",
        "gpu_memory_utilization",
        "lora_adapters",
        "template",
        "limit_mm_per_prompt",
        "low_vram",
        "swap_space",
    ]
    assert misspelled_fields([*of_engines, *others, "tensor_parallel_size", "max_model_len", "load_format"]) == ()
