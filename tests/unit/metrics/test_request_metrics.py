"""Receipts as counts by model, node and key: what is counted, and how many series there can be."""

from __future__ import annotations

from typing import Any, cast

import pytest

from corral.contract.receipts import Receipt
from corral.controller.metrics.labels import LabelNames
from corral.controller.metrics.requests import RequestMetrics
from corral.store.engine.transactions import Store
from tests.support.manual_clock import ManualClock


def metrics_of(*receipts: Receipt, models: int = 3, **limits: int) -> RequestMetrics:
    metrics = RequestMetrics(cast(Store, None), ManualClock(), **limits)
    metrics.models.learn({f"m{number}": f"m{number}" for number in range(models)})
    metrics.nodes.learn({"n1": "barn", "n2": "byre"})
    metrics.keys.learn({"k1": "notebook", "k2": "robot"})
    metrics.count(receipts)
    return metrics


def receipt(**known: Any) -> Receipt:
    defaults: dict[str, Any] = {"model": "m0", "node_id": "n1", "key_id": "k1", "status": 200, "total_ms": 40.0}
    return Receipt(**(defaults | known))


def samples(metrics: RequestMetrics, name: str) -> dict[tuple[str, ...], float]:
    return {
        tuple(sample.labels.values()): sample.value
        for family in metrics.collect()
        for sample in family.samples
        if sample.name == name
    }


def test_requests_and_tokens_are_counted_by_name() -> None:
    metrics = metrics_of(
        receipt(prompt_tokens=7, completion_tokens=5),
        receipt(prompt_tokens=1, completion_tokens=2),
        receipt(status=503, node_id="", key_id="k2"),
        receipt(model="alias", served_by="m1"),
    )
    assert samples(metrics, "corral_requests_total") == {
        ("m0", "barn", "notebook", "200"): 2,
        ("m0", "none", "robot", "503"): 1,
        ("m1", "barn", "notebook", "200"): 1,
    }
    assert samples(metrics, "corral_prompt_tokens_total")["m0", "barn", "notebook"] == 8
    assert samples(metrics, "corral_completion_tokens_total")["m0", "barn", "notebook"] == 7


def test_times_are_those_of_the_receipts() -> None:
    metrics = metrics_of(
        receipt(first_byte_ms=200.0, total_ms=1200.0, completion_tokens=11, queue_ms=50.0, load_ms=2000.0),
        receipt(total_ms=800.0, completion_tokens=9),
    )
    place = ("m0", "barn")
    assert samples(metrics, "corral_request_seconds_count")[place] == 2
    assert samples(metrics, "corral_request_seconds_sum")[place] == pytest.approx(2.0)
    for name, total_s in (
        ("time_to_first_token", 0.2),
        ("time_per_output_token", 0.1),
        ("queue", 0.05),
        ("load_wait", 2.0),
    ):
        assert samples(metrics, f"corral_{name}_seconds_count")[place] == 1, name
        assert samples(metrics, f"corral_{name}_seconds_sum")[place] == pytest.approx(total_s), name


@pytest.mark.parametrize("field", ["model", "node_id", "key_id"])
def test_what_the_fleet_does_not_know_counts_as_other(field: str) -> None:
    metrics = metrics_of(*(receipt(**{field: f"made-up-{number}"}) for number in range(50)))
    ((labels, count),) = samples(metrics, "corral_requests_total").items()
    assert count == 50
    assert "other" in labels
    assert not any("made-up" in label for label in labels)


def test_nothing_is_lost_beyond_the_limits() -> None:
    many = [
        receipt(model=f"m{model}", node_id=node, key_id=key, total_ms=1.0)
        for model in range(30)
        for node in ("n1", "n2")
        for key in ("k1", "k2")
    ]
    metrics = metrics_of(*many, models=30, max_series=10, max_histograms=4)
    counts = samples(metrics, "corral_requests_total")
    assert len(counts) == 11
    assert counts["other", "other", "other", "200"] == 110
    seconds = samples(metrics, "corral_request_seconds_count")
    assert len(seconds) == 5
    assert sum(seconds.values()) == 120


def test_a_label_is_kept_when_later_names_come() -> None:
    names = LabelNames(limit=2)
    names.learn({"1": "a", "2": "b", "3": "c"})
    assert [names.label(each) for each in ("1", "2", "3", "1", "", "9")] == ["a", "b", "other", "a", "none", "other"]
    names.learn({"1": "renamed", "2": "b"})
    assert [names.label(each) for each in ("1", "2")] == ["other", "b"]


def test_counters_never_decrease() -> None:
    metrics = metrics_of(receipt(prompt_tokens=5), receipt(prompt_tokens=-3, completion_tokens=-1, status=99_999))
    assert samples(metrics, "corral_prompt_tokens_total") == {("m0", "barn", "notebook"): 5}
    assert samples(metrics, "corral_requests_total")["m0", "barn", "notebook", "0"] == 1
