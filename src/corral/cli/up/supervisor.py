"""Supervises child processes: restarts them when they end, stops them in order, leaves none behind.

The supervisor does not know what the processes do. Each child has a task that starts the process, waits for its end
and restarts it; the delay between two starts grows only while starts fail. The supervisor keeps the listening sockets
of a child open between two runs. Children run in their own sessions, so a Ctrl-C in the terminal reaches only the
supervisor, which stops them in order. Forks happen in the main thread: the kernel sends the parent-death signal when
the thread that forked ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from corral.cli.up import guard
from corral.cli.up.children import ChildSpec
from corral.cli.up.guard import LISTENER_NAME, LISTENERS
from corral.cli.up.logs import LastLines, RotatingFile
from corral.kit.clock import Clock
from corral.kit.retry import Backoff
from corral.kit.sockets import READY_FD

GUARD = Path(guard.__file__)
_CHUNK_BYTES = 64 * 1024


@dataclass(frozen=True)
class Timing:
    restart_first_s: float = 0.5
    restart_cap_s: float = 30.0
    steady_after_s: float = 30.0  # a child that ran for this time counts as started, even without readiness report
    restart_every_s: float = 1.0  # minimum time between two starts of a child that had started
    kill_wait_s: float = 5.0  # for the kernel to end a process after SIGKILL


DEFAULT_TIMING = Timing()


class Child:
    """One supervised process: a run, and after its end the next one."""

    def __init__(
        self,
        spec: ChildSpec,
        *,
        log: RotatingFile,
        timing: Timing,
        clock: Clock,
        report: Callable[[str], None],
        echo: Callable[[str], None] | None,
    ) -> None:
        self.name = spec.name
        self.starts = 0
        self.failed_starts = 0  # in a row
        self.last_lines: list[str] = []  # of output of the run that ended last
        self._spec = spec
        self._log = log
        self._timing = timing
        self._clock = clock
        self._report = report
        self._echo = echo
        self._run: _Run | None = None
        self._retiring: dict[_Run, asyncio.Task[int]] = {}  # runs that drain while their successor has started
        self._wake = asyncio.Event()  # set to end the delay before the next start
        self._is_stopped = False  # no further start
        self._kill_at_once = False

    @property
    def pid(self) -> int | None:
        return None if self._run is None else self._run.pid

    @property
    def is_ready(self) -> bool:
        """The process of the current run has reported that it is ready."""
        return self._run is not None and self._run.is_ready

    def use(self, command: tuple[str, ...]) -> None:
        """Start this command from the next run on."""
        self._spec = replace(self._spec, command=command)

    async def run(self) -> None:
        """Run until `stop`. When this returns, the processes have ended."""
        backoff = Backoff(self._timing.restart_first_s, self._timing.restart_cap_s)
        try:
            while not self._is_stopped:
                self._wake.clear()
                run = self._run = _Run(self._spec, self._timing, self._clock, self._log, self._report, self._echo)
                self.starts += 1
                ending = asyncio.create_task(
                    run.run_to_exit(kill_at_once=self._kill_at_once), name=f"run of {self.name}"
                )
                if (
                    self._spec.listeners
                ):  # the supervisor keeps them open: the successor can start while this run drains
                    stopping = asyncio.create_task(run.stop_requested.wait(), name=f"stop of {self.name}")
                    await asyncio.wait((ending, stopping), return_when=asyncio.FIRST_COMPLETED)
                    stopping.cancel()
                    if not ending.done() and not self._is_stopped:
                        self._retire(run, ending)
                        continue
                code = await ending
                self.last_lines = run.last_lines
                if run.stop_requested.is_set():  # the end was requested
                    continue
                await self._sleep(self._restart_delay_s(run, backoff, code))
        finally:
            self._run = None
            await asyncio.gather(*self._retiring.values(), return_exceptions=True)

    def _retire(self, run: _Run, ending: asyncio.Task[int]) -> None:
        self._retiring[run] = ending
        ending.add_done_callback(lambda _: self._retiring.pop(run, None))

    def _restart_delay_s(self, run: _Run, backoff: Backoff, code: int) -> float:
        """The delay until the next start. Only failed starts make it longer: a process that was ready and then killed
        is restarted at once."""
        ran_s = self._clock.monotonic() - run.began
        steady_s = min(self._timing.steady_after_s, self._spec.steady_after_s)
        if run.is_ready or ran_s >= steady_s:
            backoff.reset()
            self.failed_starts = 0
            wait_s = max(0.0, self._timing.restart_every_s - ran_s)
        else:
            self.failed_starts += 1
            wait_s = backoff.next_s()
        when = f"in {wait_s:.1f} s" if wait_s else "now"
        self._report(f"{self.name} ended ({describe_exit(code)}); restarting {when}")
        if self.failed_starts in (3, 10) or (self.failed_starts and self.failed_starts % 100 == 0):
            self._report(
                f"{self.name} failed to start {self.failed_starts} times; its last output (full log: {self._log.path}):"
            )
            for line in self.last_lines:
                self._report(f"  {line}")
        return wait_s

    async def _sleep(self, wait_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._wake.wait()

    def stop(self) -> None:
        self._is_stopped = True
        for listener in self._spec.listeners:  # refuse new connections instead of leaving them in the backlog
            listener.close()
        self.restart()

    def restart(self) -> None:
        """Request the stop of the current run, which gets its stop timeout; the next run starts at once."""
        self._wake.set()
        if self._run is not None:
            self._run.stop_requested.set()

    def kill(self) -> None:
        """Kill the processes at once with SIGKILL."""
        self._kill_at_once = True
        for run in (*self._retiring, *([self._run] if self._run else [])):
            run.kill()
        self.stop()

    def signal(self, number: signal.Signals) -> None:
        if self._run is not None:
            self._run.signal(number)


class _Run:
    """One process, from its start to its end."""

    def __init__(
        self,
        spec: ChildSpec,
        timing: Timing,
        clock: Clock,
        log: RotatingFile,
        report: Callable[[str], None],
        echo: Callable[[str], None] | None,
    ) -> None:
        self.began = clock.monotonic()
        self.is_ready = False  # the process has reported that it is ready
        self.stop_requested = asyncio.Event()
        self.pid: int | None = None
        self.last_lines: list[str] = []
        self._spec = spec
        self._timing = timing
        self._clock = clock
        self._log = log
        self._report = report
        self._echo = echo
        self._tail = LastLines()
        self._kill_at_once = False

    async def run_to_exit(self, *, kill_at_once: bool) -> int:
        self._kill_at_once = kill_at_once
        # Not a pipe of asyncio: its `wait` returns only when the pipe is closed, and a grandchild may hold it open for
        # days.
        output_read, output_write = os.pipe()
        ready_read, ready_write = os.pipe()
        loop = asyncio.get_running_loop()
        for descriptor, on_data in ((output_read, self._on_output), (ready_read, self._on_ready)):
            os.set_blocking(descriptor, False)
            loop.add_reader(descriptor, on_data, descriptor)
        try:
            process = await self._start(output_write, ready_write)
            return 1 if process is None else await self._wait(process)
        finally:
            self._on_output(output_read)
            self._on_ready(ready_read)
            self.last_lines = self._tail.lines()
            for descriptor in (output_read, ready_read):
                loop.remove_reader(descriptor)
                os.close(descriptor)

    async def _start(self, output: int, ready: int) -> asyncio.subprocess.Process | None:
        listeners = [each.fileno() for each in self._spec.listeners]
        env = dict(self._spec.env) | {READY_FD: str(ready)}
        if listeners:
            env |= {LISTENERS: ",".join(map(str, listeners)), LISTENER_NAME: self._spec.name}
        try:
            return await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", str(GUARD), str(os.getpid())),
                *self._spec.command,
                env=env,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                pass_fds=(*listeners, ready),
            )
        except OSError as error:  # no process or memory left: the same as a run that ended at once
            self._tail.feed(f"cannot start: {error.strerror or error}\n".encode())
            return None
        finally:
            os.close(output)
            os.close(ready)

    async def _wait(self, process: asyncio.subprocess.Process) -> int:
        self.pid = process.pid
        ending = asyncio.create_task(self._stop_when_requested(process), name=f"end of {self._spec.name}")
        try:
            return await process.wait()
        finally:
            ending.cancel()
            self.pid = None
            if process.returncode is None:
                _signal(process, signal.SIGKILL)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._timing.kill_wait_s):
                        await process.wait()

    def _on_output(self, descriptor: int) -> None:
        with contextlib.suppress(BlockingIOError):
            while data := os.read(descriptor, _CHUNK_BYTES):
                self._log.write(data)
                for line in self._tail.feed(data):
                    if self._echo is not None:
                        self._echo(f"{self._spec.name:>10} | {line.decode('utf-8', errors='replace').rstrip()}")
            asyncio.get_running_loop().remove_reader(descriptor)  # the other end is closed

    def _on_ready(self, descriptor: int) -> None:
        with contextlib.suppress(BlockingIOError):
            if os.read(descriptor, 16):
                self.is_ready = True
            asyncio.get_running_loop().remove_reader(descriptor)

    async def _stop_when_requested(self, process: asyncio.subprocess.Process) -> None:
        await self.stop_requested.wait()
        if self._kill_at_once:
            _signal(process, signal.SIGKILL)
            return
        _signal(process, signal.SIGTERM)
        await self._clock.sleep(self._spec.stop_timeout_s)
        self._report(f"{self._spec.name} did not stop within {self._spec.stop_timeout_s:g} s; killing it")
        _signal(process, signal.SIGKILL)

    def kill(self) -> None:
        self._kill_at_once = True
        self.stop_requested.set()
        self.signal(signal.SIGKILL)

    def signal(self, number: signal.Signals) -> None:
        if self.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


class Supervisor:
    """`async with Supervisor(…) as supervisor: supervisor.start(spec)`. Leaving the block stops the children in
    `stop_order`; `kill()` ends all of them at once."""

    def __init__(
        self,
        logs: Path,
        *,
        clock: Clock,
        report: Callable[[str], None],
        echo: Callable[[str], None] | None = None,
        timing: Timing = DEFAULT_TIMING,
        stop_order: Sequence[str] = (),
        log_file_bytes: int = 16 * 1024 * 1024,
    ) -> None:
        self.children: dict[str, Child] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._files: list[RotatingFile] = []
        self._logs = logs
        self._clock = clock
        self._report = report
        self._echo = echo
        self._timing = timing
        self._stop_order = tuple(stop_order)
        self._log_file_bytes = log_file_bytes

    def start(self, spec: ChildSpec) -> Child:
        log = RotatingFile(self._logs / f"{spec.name}.log", max_bytes=self._log_file_bytes)
        self._files.append(log)
        child = Child(spec, log=log, timing=self._timing, clock=self._clock, report=self._report, echo=self._echo)
        self.children[spec.name] = child
        self._tasks[spec.name] = asyncio.create_task(child.run(), name=spec.name)
        return child

    def kill(self) -> None:
        for child in self.children.values():
            child.kill()

    async def stop(self) -> None:
        """Stop one child after the other: a process stops before the processes that it depends on."""
        listed = [name for name in self._stop_order if name in self.children]
        rest = [name for name in reversed(self.children) if name not in listed]
        for name in (*rest, *listed):
            self.children[name].stop()
            await asyncio.wait([self._tasks[name]])

    async def __aenter__(self) -> Supervisor:
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            await self.stop()
        finally:
            self.kill()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)
            for file in self._files:
                file.close()


def describe_exit(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def _signal(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(number)
