"""Keeps processes running: started again when they end, stopped in order, none left behind.

Knows nothing of what they are. Each child is a task: start, wait, tell, back off, again. Children live in sessions of
their own, so a Ctrl-C in the terminal reaches only us, and we stop them in order. Forks happen in the main thread: the
signal that ends children with us is tied to the thread that made them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from corral.cli.up.children import ChildSpec
from corral.cli.up.logs import RotatingFile, Tail
from corral.kit.backoff import Backoff
from corral.kit.clock import Clock

GUARD = Path(__file__).with_name("guard.py")
_CHUNK_BYTES = 64 * 1024


@dataclass(frozen=True)
class Timing:
    restart_first_s: float = 0.5
    restart_cap_s: float = 30.0
    steady_after_s: float = 30.0  # a child that ran for so long had a good start
    kill_wait_s: float = 5.0  # after SIGKILL only the kernel is in the way


DEFAULT_TIMING = Timing()


class Child:
    """One process, again and again."""

    def __init__(
        self,
        spec: ChildSpec,
        *,
        log: RotatingFile,
        timing: Timing,
        clock: Clock,
        tell: Callable[[str], None],
        echo: Callable[[str], None] | None,
    ) -> None:
        self.name = spec.name
        self.starts = 0
        self.quick_ends = 0  # ends in a row that came too soon after their start
        self.pid: int | None = None
        self.last_words: list[str] = []  # of the run that ended last
        self._spec = spec
        self._log = log
        self._timing = timing
        self._clock = clock
        self._tell = tell
        self._echo = echo
        self._tail = Tail()
        self._told = asyncio.Event()  # to end the process that runs now
        self._over = False  # and to start no other
        self._hurried = False

    async def run(self) -> None:
        """Until `stop`. Always leaves with the process gone."""
        backoff = Backoff(self._timing.restart_first_s, self._timing.restart_cap_s)
        while not self._over:
            self._told.clear()
            began = self._clock.monotonic()
            code = await self._once()
            if self._told.is_set():  # it ended because we said so
                continue
            if self._clock.monotonic() - began >= self._timing.steady_after_s:
                backoff.reset()
                self.quick_ends = 0
            self.quick_ends += 1
            wait_s = backoff.next_s()
            self._tell_end(code, wait_s)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._told.wait()

    def _tell_end(self, code: int, wait_s: float) -> None:
        self._tell(f"{self.name} ended ({how_it_ended(code)}); starting it again in {wait_s:.1f} s")
        if self.quick_ends in (3, 10) or self.quick_ends % 100 == 0:  # told, not shouted
            self._tell(f"{self.name} keeps ending; its last words (all of them: {self._log.path}):")
            for line in self.last_words:
                self._tell(f"  {line}")

    async def _once(self) -> int:
        self._tail.clear()
        # A pipe of ours, not asyncio's: there a child's end waits until the pipe is closed, and a grandchild may hold
        # it open for days.
        ear, mouth = os.pipe()
        loop = asyncio.get_running_loop()
        os.set_blocking(ear, False)
        loop.add_reader(ear, self._hear, ear)
        try:
            process = await self._start(mouth)
            return 1 if process is None else await self._to_its_end(process)
        finally:
            self._hear(ear)
            self.last_words = self._tail.lines()
            loop.remove_reader(ear)
            os.close(ear)

    async def _start(self, mouth: int) -> asyncio.subprocess.Process | None:
        try:
            return await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", str(GUARD), str(os.getpid())),
                *self._spec.command,
                env=dict(self._spec.env),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=mouth,
                stderr=mouth,
                start_new_session=True,
            )
        except OSError as error:  # out of processes or memory: as if it had ended at once
            self._tail.feed(f"cannot start: {error.strerror or error}\n".encode())
            return None
        finally:
            os.close(mouth)

    async def _to_its_end(self, process: asyncio.subprocess.Process) -> int:
        self.starts += 1
        self.pid = process.pid
        ending = asyncio.create_task(self._end_when_told(process), name=f"end of {self.name}")
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

    def _hear(self, ear: int) -> None:
        with contextlib.suppress(BlockingIOError):
            while data := os.read(ear, _CHUNK_BYTES):
                self._log.write(data)
                for line in self._tail.feed(data):
                    if self._echo is not None:
                        self._echo(f"{self.name:>10} | {line.decode('utf-8', errors='replace').rstrip()}")
            asyncio.get_running_loop().remove_reader(ear)  # the other end is closed: nothing will come

    async def _end_when_told(self, process: asyncio.subprocess.Process) -> None:
        await self._told.wait()
        if self._hurried:
            _signal(process, signal.SIGKILL)
            return
        _signal(process, signal.SIGTERM)
        await self._clock.sleep(self._spec.stop_timeout_s)
        self._tell(f"{self.name} did not stop within {self._spec.stop_timeout_s:g} s and is killed")
        _signal(process, signal.SIGKILL)

    def stop(self) -> None:
        self._over = True
        self._told.set()

    def restart(self) -> None:
        """In order: told to stop, given its time, started again at once."""
        self._told.set()

    def kill(self) -> None:
        """At once, without a chance to tidy up."""
        self._hurried = True
        self.stop()
        self.signal(signal.SIGKILL)

    def signal(self, number: signal.Signals) -> None:
        if self.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


class Supervisor:
    """`async with Supervisor(…) as supervisor: supervisor.start(spec)`. Leaving the block stops what still runs, in
    the order given; `hurry()` makes that quick."""

    def __init__(
        self,
        logs: Path,
        *,
        clock: Clock,
        tell: Callable[[str], None],
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
        self._tell = tell
        self._echo = echo
        self._timing = timing
        self._stop_order = tuple(stop_order)
        self._log_file_bytes = log_file_bytes

    def start(self, spec: ChildSpec) -> Child:
        log = RotatingFile(self._logs / f"{spec.name}.log", max_bytes=self._log_file_bytes)
        self._files.append(log)
        child = Child(spec, log=log, timing=self._timing, clock=self._clock, tell=self._tell, echo=self._echo)
        self.children[spec.name] = child
        self._tasks[spec.name] = asyncio.create_task(child.run(), name=spec.name)
        return child

    def hurry(self) -> None:
        for child in self.children.values():
            child.kill()

    async def stop(self) -> None:
        """One after the other: who depends on others goes first, so each can still say goodbye."""
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
            self.hurry()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)
            for file in self._files:
                file.close()


def how_it_ended(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def _signal(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(number)
