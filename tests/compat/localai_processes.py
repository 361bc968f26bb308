"""Processes of a scripted LocalAI worker that really run (docs/reference/wire/processes.md).

A process is `run.sh --addr 0.0.0.0:PORT` with the shared token in its environment; it counts once Health says OK.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import grpc
import grpc.aio

from corral.contract import backend_pb2 as pb
from corral.contract.backend_pb2_grpc import BackendStub
from tests.support.waiting import until


class LocalAIProcesses:
    def __init__(self, backend: Path, token: str, logs: Path, **env: str) -> None:
        """`backend`: the folder every build consists of."""
        self.backend = backend
        self.token = token
        self.logs = logs
        self.env = env
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    async def start(self, key: str, port: int) -> str:
        """Empty when it serves, else why not, with its last lines."""
        log = self.logs / f"{key.replace('/', '-')}.log"
        process = self._spawn(port, log)

        async def is_decided() -> bool:
            return process.poll() is not None or await self._answers(f"127.0.0.1:{port}")

        try:
            await until(is_decided, "a process that serves or has ended")
        except AssertionError:
            process.kill()
            return "not ready within 30 s"
        if process.poll() is not None:
            return f"process exited during start-up: {log.read_text()[-2000:]}"
        self.running[key] = process
        return ""

    def _spawn(self, port: int, log: Path) -> subprocess.Popen[bytes]:
        env = {"PATH": os.environ["PATH"], "LOCALAI_GRPC_AUTH_TOKEN": self.token, "CORRAL_PYTHON": sys.executable}
        with log.open("wb") as out:
            return subprocess.Popen(
                ["./run.sh", "--addr", f"0.0.0.0:{port}"],
                cwd=self.backend,
                env=env | self.env,
                stdout=subprocess.DEVNULL,
                stderr=out,
                start_new_session=True,
            )

    def lines(self) -> dict[str, list[dict[str, str]]]:
        """What each has written, as the log store has it (docs/reference/wire/files.md#backend-logs)."""
        return {
            path.name.removesuffix(".log"): [
                {"timestamp": f"2026-01-01T00:00:00.{number:06}Z", "stream": "stderr", "text": text}
                for number, text in enumerate(path.read_text().splitlines())
            ]
            for path in self.logs.glob("*.log")
        }

    def lives(self, key: str) -> bool:
        return key in self.running and self.running[key].poll() is None

    async def stop(self, key: str, port: int, *, free: bool) -> bool:
        """Whether Free worked. Then it is killed and awaited."""
        process = self.running.pop(key, None)
        if process is None or process.poll() is not None:
            return False
        freed = free and await self._free(f"127.0.0.1:{port}")
        os.killpg(process.pid, signal.SIGTERM)
        try:
            await asyncio.to_thread(process.wait, 15)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            await asyncio.to_thread(process.wait)
        return freed

    def kill(self, key: str) -> None:
        """As the kernel would when memory runs out."""
        os.killpg(self.running[key].pid, signal.SIGKILL)
        self.running[key].wait()

    def close(self) -> None:
        for process in self.running.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    async def _answers(self, address: str) -> bool:
        try:
            async with grpc.aio.insecure_channel(address) as channel:
                reply = await BackendStub(channel).Health(pb.HealthMessage(), timeout=2, metadata=self._metadata)
        except grpc.aio.AioRpcError:
            return False
        return bytes(reply.message) == b"OK"

    async def _free(self, address: str) -> bool:
        try:
            async with grpc.aio.insecure_channel(address) as channel:
                result = await BackendStub(channel).Free(pb.HealthMessage(), timeout=5, metadata=self._metadata)
        except grpc.aio.AioRpcError:
            return False
        return bool(result.success)

    @property
    def _metadata(self) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {self.token}"),)
