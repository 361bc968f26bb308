"""Waits until a new process serves, or until it is clear that it will not.

A fixed deadline would be too long for a process that hangs and too short for one that reads 80 GB. So every sign of
progress extends it: a line of output, or growing memory.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, NamedTuple, TypeVar

import psutil

from corral.contract.manifest import GRPC
from corral.kit.errors import Failed
from corral.worker.settings.processes import ProcessSettings
from corral.worker.supervisor.identity import listens_elsewhere
from corral.worker.supervisor.process import LAST_LINES, BackendProcess
from corral.worker.supervisor.spec import LOOPBACK, ProcessSpec

T = TypeVar("T")
_GROWTH_BYTES = 16 * 1024 * 1024
_LOOK_S = 1.0
MAX_RESPONSE_BYTES = 64 * 1024
END_NOTICED_S = 2.0


class StartFailed(Failed):
    """A process that never served. The message ends with its last lines of stderr."""

    code = "start_failed"


def start_failed(why: str, process: BackendProcess | None) -> StartFailed:
    words = process.last_lines() if process is not None else []
    if not words:
        return StartFailed(f"{why}; it wrote nothing" if process is not None else why)
    lines = "\n".join(words)
    return StartFailed(f"{why}; its last lines (at most {LAST_LINES}):\n{lines}")


class Endpoint(NamedTuple):
    """Address and token of a process."""

    port: int
    token: str
    protocol: str
    path: str

    @property
    def address(self) -> str:
        return f"{LOOPBACK}:{self.port}"


async def probe(endpoint: Endpoint, timeout_s: float) -> str | None:
    """None when the process is ready, else why it is not."""
    if endpoint.protocol == GRPC:
        from corral.worker.supervisor.grpc_calls import ask_health  # see there: memory

        return await ask_health(endpoint.address, endpoint.token, timeout_s)
    try:
        async with asyncio.timeout(timeout_s):
            status = await _get_status(endpoint)
    except (OSError, TimeoutError, ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
        return str(error) or type(error).__name__
    return None if 200 <= status < 300 else f"GET {endpoint.path} answered {status}"


async def _get_status(endpoint: Endpoint) -> int:
    reader, writer = await asyncio.open_connection(LOOPBACK, endpoint.port, limit=MAX_RESPONSE_BYTES)
    try:
        writer.write(
            f"GET {endpoint.path} HTTP/1.1\r\nHost: {endpoint.address}\r\nAuthorization: Bearer {endpoint.token}\r\n"
            "Connection: close\r\n\r\n".encode()
        )
        line = await reader.readuntil(b"\r\n")
    finally:
        writer.close()
    version, _, rest = line.partition(b" ")
    if not version.startswith(b"HTTP/1."):
        raise ValueError(f"it does not speak HTTP: {line[:40]!r}")
    return int(rest[:3])


async def wait_until_ready(
    process: BackendProcess, spec: ProcessSpec, endpoint: Endpoint, settings: ProcessSettings
) -> None:
    """Return when the process answers. Raises StartFailed when it ended, made no progress, or exceeded its start
    timeout."""
    began = time.monotonic()
    patience = ProgressWatch(process, spec.silence_s or spec.manifest.ready.timeout_s)
    while True:
        why = await _unless_ended(process, probe(endpoint, settings.backend_probe_timeout_s))
        if process.ended.done():
            raise start_failed(f"{spec.backend} {process.ended.result()} while it started", process)
        if why is None:
            break
        if (silent := await patience.is_over()) is not None:
            raise start_failed(f"{spec.backend} was not ready and {silent} ({why})", process)
        if spec.start_timeout_s and time.monotonic() - began > spec.start_timeout_s:
            raise start_failed(f"{spec.backend} was not ready within {spec.start_timeout_s:g} s ({why})", process)
        await asyncio.wait([process.ended], timeout=settings.backend_poll_s)
    try:
        is_stranger = await asyncio.to_thread(listens_elsewhere, endpoint.port, process.identity.shim_pid)
    except PermissionError as error:
        cause = (
            f"the worker may not see which program answers on port {endpoint.port}: give it the capability SYS_PTRACE "
            "(`docker run --cap-add SYS_PTRACE`), or run it without root"
        )
        raise start_failed(cause, process) from error
    if is_stranger:
        raise start_failed(f"another program answers on port {endpoint.port}", process)


async def load(process: BackendProcess, spec: ProcessSpec, endpoint: Endpoint) -> None:
    """LoadModel, where the spec asks for it."""
    if not spec.load or spec.protocol != GRPC:
        return
    from corral.worker.supervisor.grpc_calls import BrokeOff, load_model

    try:
        await _unless_ended(process, load_model(endpoint.address, endpoint.token, spec.load, spec.load_timeout_s))
    except Failed as error:
        if isinstance(error, BrokeOff):
            # A killed process closes its connections first; its shim reports the end a moment later.
            await asyncio.wait([process.ended], timeout=END_NOTICED_S)
        if not process.ended.done():
            raise start_failed(f"{spec.backend} could not load the model: {error.message}", process) from error
    if process.ended.done():
        raise start_failed(f"{spec.backend} {process.ended.result()} while it loaded the model", process)


class ProgressWatch:
    def __init__(self, process: BackendProcess, silence_s: float) -> None:
        self._process = process
        self._silence_s = silence_s
        self._moved_at = time.monotonic()
        self._looked_at = self._moved_at
        self._lines = 0
        self._bytes = 0

    async def is_over(self) -> str | None:
        """None while there is progress, else what was missing."""
        now = time.monotonic()
        if self._process.output.lines > self._lines:
            self._lines, self._moved_at = self._process.output.lines, now
        if now - self._looked_at >= min(_LOOK_S, self._silence_s / 4):
            self._looked_at = now
            used = await asyncio.to_thread(_memory, self._process.identity.shim_pid)
            if used > self._bytes + _GROWTH_BYTES:
                self._bytes, self._moved_at = used, now
        if now - self._moved_at > self._silence_s:
            return f"gave no sign of progress for {self._silence_s:g} s"
        return None


def _memory(shim_pid: int) -> int:
    """RAM of the backend and its children."""
    total = 0
    try:
        for process in psutil.Process(shim_pid).children(recursive=True):
            try:
                total += process.memory_info().rss
            except psutil.Error:
                continue
    except psutil.Error:
        pass
    return total


async def _unless_ended(process: BackendProcess, work: Coroutine[Any, Any, T]) -> T | None:
    """The work's result, or None when the process ended first."""
    working = asyncio.ensure_future(work)
    try:
        await asyncio.wait((working, process.ended), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
