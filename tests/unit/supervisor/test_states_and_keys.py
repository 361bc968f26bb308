"""What may become of a process; how it is named."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.contract.messages.replicas import ReplicaState
from corral.worker.supervisor.keys import choose_by_name, parse_key, process_key
from corral.worker.supervisor.states import NEVER, GiveUp, ProcessEvent, RestartIn, RestartPolicy, after, decide_restart


@pytest.mark.parametrize(
    ("state", "happened", "following"),
    [
        ("starting", "answered", "ready"),
        ("starting", "never run", None),
        ("starting", "ended", "restarting"),
        ("starting", "given up", "failed"),
        ("starting", "stop", "stopping"),
        ("ready", "ended", "restarting"),
        ("ready", "given up", "failed"),
        ("ready", "stop", "stopping"),
        ("restarting", "again", "starting"),
        ("restarting", "stop", "stopping"),
        ("failed", "stop", "stopping"),
        ("stopping", "stopped", None),
    ],
)
def test_possible_steps(state: str, happened: str, following: str | None) -> None:
    assert after(ReplicaState(state), ProcessEvent(happened)) == following


def test_all_other_steps_are_mistakes() -> None:
    def is_possible(state: ReplicaState, happened: ProcessEvent) -> bool:
        with contextlib.suppress(ValueError):
            after(state, happened)
            return True
        return False

    assert sum(is_possible(*step) for step in product(ReplicaState, ProcessEvent)) == 12
    with pytest.raises(ValueError, match="a process that is ready cannot have again"):
        after(ReplicaState.READY, ProcessEvent.AGAIN)


def test_every_process_can_be_stopped_and_nothing_leaves_stopping_but_the_end() -> None:
    for state in ReplicaState:
        if state is not ReplicaState.STOPPING:
            assert after(state, ProcessEvent.STOP) is ReplicaState.STOPPING


@pytest.mark.parametrize(
    ("policy", "failures", "ran_s", "decided"),
    [
        (RestartPolicy(), 0, 1, RestartIn(1.0, 1)),
        (RestartPolicy(), 1, 1, RestartIn(2.0, 2)),
        (RestartPolicy(), 5, 1, RestartIn(32.0, 6)),
        (RestartPolicy(), 9, 1, RestartIn(60.0, 10)),
        (RestartPolicy(), 5000, 1, RestartIn(60.0, 5001)),
        (RestartPolicy(), 9, 300, RestartIn(1.0, 1)),
        (NEVER, 0, 1000, GiveUp(1)),
        (RestartPolicy(most=2), 1, 0, RestartIn(2.0, 2)),
        (RestartPolicy(most=2), 2, 0, GiveUp(3)),
        (RestartPolicy(most=2), 2, 300, RestartIn(1.0, 1)),
    ],
)
def test_when_a_process_comes_back(
    policy: RestartPolicy, failures: int, ran_s: float, decided: RestartIn | GiveUp
) -> None:
    assert decide_restart(policy, failures=failures, ran_s=ran_s) == decided


@pytest.mark.parametrize(
    ("model", "backend", "replica", "key"),
    [("qwen3", "llama-cpp", 0, "qwen3#0"), ("", "llama-cpp", 1, "llama-cpp#1"), ("a#b", "x", 12, "a#b#12")],
)
def test_the_key_of_a_process(model: str, backend: str, replica: int, key: str) -> None:
    assert process_key(model, backend, replica) == key


@given(st.text(min_size=1), st.integers(min_value=0, max_value=10**6))
def test_keys_split_at_the_last_hash(model: str, replica: int) -> None:
    assert parse_key(process_key(model, "", replica)) == (model, replica)


@pytest.mark.parametrize("text", ["", "#", "#0", "qwen", "qwen#", "qwen#x", "qwen#-1", "qwen#1 ", "qwen#²"])
def test_what_is_no_key_is_skipped(text: str) -> None:
    assert parse_key(text) is None


@dataclass(frozen=True)
class Row:
    key: str
    backend: str


ROWS = [
    Row("qwen#0", "llama-cpp"),
    Row("qwen#1", "llama-cpp"),
    Row("qwen#a#0", "vllm"),
    Row("llama-cpp#0", "llama-cpp"),
    Row("q#0", "cpu-llama-cpp"),
]


@pytest.mark.parametrize(
    ("name", "backends", "chosen"),
    [
        ("qwen", (), ["qwen#0", "qwen#1"]),
        ("qwen#1", (), ["qwen#1"]),
        ("qwen#a", (), []),
        ("qwen#a#0", (), ["qwen#a#0"]),
        ("llama-cpp", (), ["qwen#0", "qwen#1", "llama-cpp#0"]),
        ("llama-cpp", ("llama-cpp", "cpu-llama-cpp"), ["qwen#0", "qwen#1", "llama-cpp#0", "q#0"]),
        ("nobody", (), []),
    ],
)
def test_what_a_name_means_to_backend_stop(name: str, backends: tuple[str, ...], chosen: list[str]) -> None:
    assert [row.key for row in choose_by_name(ROWS, name, backends)] == chosen
