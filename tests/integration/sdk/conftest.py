"""The mock, and any other backend of the sdk, as processes of their own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.processes import Process, clean_env, free_port
from tests.support.supervising import MOCK
from tests.support.waiting import wait_for

TOKEN = "a token of the test's"
Run = Callable[..., tuple[Process, int]]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """`run("--http", MOCK_BUSY="1")` starts a backend and waits until it listens; gives it and its port."""
    started: list[Process] = []

    def start(
        protocol: str, *words: str, program: Path = MOCK / "mock.py", wait: bool = True, **env: str
    ) -> tuple[Process, int]:
        port = free_port()
        told = clean_env(tmp_path, LOCALAI_GRPC_AUTH_TOKEN=TOKEN) | env
        command = [sys.executable, "-B", str(program), protocol, f"127.0.0.1:{port}", *words]
        process = Process(command, told, tmp_path / f"backend-{len(started)}.log")
        started.append(process)
        if wait:
            wait_for(lambda: "Listening on" in process.output() or not process.running, "backend that listens")
        return process, port

    yield start
    for process in started:
        process.close()
