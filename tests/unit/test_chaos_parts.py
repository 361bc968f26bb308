"""The parts of `scripts/chaos` that only compute: its report, the causes of failed requests, slopes of memory."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from tests.chaos.clients import RequestFailed, cause_of, text_of
from tests.chaos.main import Result, as_json, report
from tests.chaos.watcher import Growth, MemorySample, slope


def test_a_report_names_what_was_lost() -> None:
    result = Result(seed=7, minutes=2.0, answered=Counter({"m": 98}), failed=Counter({"connection lost": 2}))
    result.growth = [Growth("gateway-0", 10.0, 1 << 20, 2 << 20, float(6 << 20))]
    assert result.is_good
    text = report(result)
    assert "| of these failed, without any retry | 2 (2.00 %) |" in text
    assert "| gateway-0 | 10 min, 2 MiB, +6.0 MiB/h |" in text
    lost = Result(seed=7, minutes=2.0, not_at_rest=["operation 12 was accepted and is not known any more"])
    assert not lost.is_good
    assert "- operation 12 was accepted and is not known any more" in report(lost)


def test_scripts_read_the_counts_of_a_run() -> None:
    result = Result(seed=7, minutes=2.0, answered=Counter({"m": 98}), journal=[(1.5, "kill -9 of gateway-0")])
    result.growth = [Growth("gateway-0", 10.0, 1, 2, 3.0)]
    said = json.loads(as_json(result))
    assert (said["answered"], said["failed"]) == ({"m": 98}, {})
    assert (said["growth"][0]["name"], said["journal"]) == ("gateway-0", [[1.5, "kill -9 of gateway-0"]])


@pytest.mark.parametrize(
    ("status", "body", "cause"),
    [
        (503, {"error": {"code": "model_busy", "type": "server_error"}}, "503 model_busy"),
        (502, {"error": {"type": "server_error"}}, "502 server_error"),
        (500, {"error": "text"}, "500 without a code"),
        (500, None, "500 without a code"),
    ],
)
def test_causes_are_the_same_words_each_time(status: int, body: object, cause: str) -> None:
    assert cause_of(status, json.dumps(body).encode() if body is not None else b"<html>") == cause


def test_a_stream_without_its_end_is_a_failure() -> None:
    event = json.dumps({"choices": [{"delta": {"content": "hi"}}]})
    assert text_of(f"data: {event}\n\ndata: [DONE]\n\n".encode(), stream=True) == "hi"
    with pytest.raises(RequestFailed, match="broken off"):
        text_of(f"data: {event}\n\n".encode(), stream=True)
    with pytest.raises(RequestFailed, match="broken off"):
        text_of(b'data: {"error": {"message": "gone"}}\n\ndata: [DONE]\n\n', stream=True)


def test_the_slope_of_memory_is_that_of_the_line_through_the_samples() -> None:
    samples = [MemorySample(10.0 * n, 1000 + 30 * n + (5 if n % 2 else -5)) for n in range(60)]
    assert slope(samples) == pytest.approx(3.0, abs=0.05)
    assert slope([MemorySample(1.0, 5)]) == 0.0
