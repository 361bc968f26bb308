"""Beside the old one, or in its place: by what was reserved and what is free."""

from __future__ import annotations

from typing import Any

import pytest

from corral.contract.messages.backends import NodeBackend
from corral.contract.messages.replicas import ReplicaDevice, ReplicaProcess
from corral.controller.backends.replacement import memory_beside, processes_of, start_took_s

GPU = (ReplicaDevice("nvidia", 0),)
META = NodeBackend("llama-cpp", False, True, meta_backend_for="cpu-llama-cpp")
BUILD = NodeBackend("cpu-llama-cpp", False, False, alias="llama")


def process(id: str = "p", backend: str = "vllm", **more: Any) -> ReplicaProcess:
    return ReplicaProcess(id, "m", 0, backend, "ready", "openai", **more)


@pytest.mark.parametrize("backend", ["llama-cpp", "cpu-llama-cpp", "llama"])
def test_a_process_is_of_a_backend_under_any_of_its_names(backend: str) -> None:
    running = [process(name, name) for name in ("llama-cpp", "cpu-llama-cpp", "llama", "vllm")]
    found = {each.process_id for each in processes_of(running, (META, BUILD), backend)}
    assert found == {"llama-cpp", "cpu-llama-cpp", "llama"}


@pytest.mark.parametrize(
    ("running", "vram", "ram", "fits"),
    [
        ([], 0, 0, True),
        ([process()], 0, 0, True),  # nobody said what it needs
        ([process(memory_bytes=5)], 0, 5, True),
        ([process(memory_bytes=5)], 9, 4, False),
        ([process(memory_bytes=5, devices=GPU)], 5, 0, True),
        ([process(memory_bytes=5, devices=GPU)], 4, 9, False),
        ([process(memory_bytes=3), process(memory_bytes=3)], 0, 5, False),  # all start before the first ends
    ],
)
def test_whether_memory_holds_both(running: list[ReplicaProcess], vram: int, ram: int, fits: bool) -> None:
    need = memory_beside(running, free_vram=vram, free_ram=ram)
    assert need.fits is fits
    assert need.fits or "free" in need.words


def test_a_successor_takes_as_long_to_start() -> None:
    times = {"started_at": "2026-01-01T12:00:00Z", "ready_at": "2026-01-01T12:00:07.5Z"}
    assert start_took_s(process(**times)) == 7.5
    assert start_took_s(process()) is None
    assert start_took_s(process(**(times | {"ready_at": "soon"}))) is None
