"""Keeps processes running: started again when they end, stopped in order, none left behind.

Knows nothing of what they are. Each child is a task: start, wait, tell, again; the wait between two starts grows only
while starts fail. The listening sockets of a child stay open here between two runs of it. Children live in sessions of
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

from corral.cli.up import guard
from corral.cli.up.children import ChildSpec
from corral.cli.up.guard import LISTENER_NAME, LISTENERS
from corral.cli.up.logs import RotatingFile, Tail
from corral.kit.backoff import Backoff
from corral.kit.clock import Clock
from corral.kit.socket_activation import READY_FD

GUARD = Path(guard.__file__)
_CHUNK_BYTES = 64 * 1024


@dataclass(frozen=True)
class Timing:
    restart_first_s: float = 0.5
    restart_cap_s: float = 30.0
    steady_after_s: float = 30.0  # a child that ran for so long had a good start, whether it said so or not
    restart_every_s: float = 1.0  # a child that had a good start is started again at once, at most so often
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
        self.quick_ends = 0  # starts in a row that failed
        self.last_words: list[str] = []  # of the run that ended last
        self._spec = spec
        self._log = log
        self._timing = timing
        self._clock = clock
        self._tell = tell
        self._echo = echo
        self._run: _Run | None = None
        self._retiring: dict[_Run, asyncio.Task[int]] = {}  # their successor runs already
        self._waiting = asyncio.Event()  # ends the wait before the next start
        self._over = False  # start no other
        self._hurried = False

    @property
    def pid(self) -> int | None:
        return None if self._run is None else self._run.pid

    async def run(self) -> None:
        """Until `stop`. Always leaves with its processes gone."""
        backoff = Backoff(self._timing.restart_first_s, self._timing.restart_cap_s)
        try:
            while not self._over:
                self._waiting.clear()
                run = self._run = _Run(self._spec, self._timing, self._clock, self._log, self._tell, self._echo)
                self.starts += 1
                ending = asyncio.create_task(run.to_its_end(hurried=self._hurried), name=f"a run of {self.name}")
                if self._spec.listeners:  # they stay open here: the successor can start while this one drains
                    told = asyncio.create_task(run.told.wait(), name=f"the stop of {self.name}")
                    await asyncio.wait((ending, told), return_when=asyncio.FIRST_COMPLETED)
                    told.cancel()
                    if not ending.done() and not self._over:
                        self._retire(run, ending)
                        continue
                code = await ending
                self.last_words = run.last_words
                if run.told.is_set():  # it ended because we said so
                    continue
                await self._rest(self._wait_s(run, backoff, code))
        finally:
            self._run = None
            await asyncio.gather(*self._retiring.values(), return_exceptions=True)

    def _retire(self, run: _Run, ending: asyncio.Task[int]) -> None:
        self._retiring[run] = ending
        ending.add_done_callback(lambda _: self._retiring.pop(run, None))

    def _wait_s(self, run: _Run, backoff: Backoff, code: int) -> float:
        """How long until the next start. Only starts that failed make it longer: a process that did its work and was
        killed is needed back at once."""
        ran_s = self._clock.monotonic() - run.began
        steady_s = min(self._timing.steady_after_s, self._spec.steady_after_s)
        if run.is_ready or ran_s >= steady_s:
            backoff.reset()
            self.quick_ends = 0
            wait_s = max(0.0, self._timing.restart_every_s - ran_s)
        else:
            self.quick_ends += 1
            wait_s = backoff.next_s()
        when = f"in {wait_s:.1f} s" if wait_s else "now"
        self._tell(f"{self.name} ended ({how_it_ended(code)}); starting it again {when}")
        if self.quick_ends in (3, 10) or (self.quick_ends and self.quick_ends % 100 == 0):  # told, not shouted
            self._tell(f"{self.name} keeps ending; its last words (all of them: {self._log.path}):")
            for line in self.last_words:
                self._tell(f"  {line}")
        return wait_s

    async def _rest(self, wait_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._waiting.wait()

    def stop(self) -> None:
        self._over = True
        for listener in self._spec.listeners:  # from now on nobody will accept: better refused than kept waiting
            listener.close()
        self.restart()

    def restart(self) -> None:
        """In order: told to stop, given its time, started again at once."""
        self._waiting.set()
        if self._run is not None:
            self._run.told.set()

    def kill(self) -> None:
        """At once, without a chance to tidy up."""
        self._hurried = True
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
        tell: Callable[[str], None],
        echo: Callable[[str], None] | None,
    ) -> None:
        self.began = clock.monotonic()
        self.is_ready = False  # it has said that it does its work
        self.told = asyncio.Event()  # to end
        self.pid: int | None = None
        self.last_words: list[str] = []
        self._spec = spec
        self._timing = timing
        self._clock = clock
        self._log = log
        self._tell = tell
        self._echo = echo
        self._tail = Tail()
        self._hurried = False

    async def to_its_end(self, *, hurried: bool) -> int:
        self._hurried = hurried
        # A pipe of ours, not asyncio's: there a child's end waits until the pipe is closed, and a grandchild may hold
        # it open for days.
        ear, mouth = os.pipe()
        ready, sign = os.pipe()
        loop = asyncio.get_running_loop()
        for descriptor, hear in ((ear, self._hear), (ready, self._hear_ready)):
            os.set_blocking(descriptor, False)
            loop.add_reader(descriptor, hear, descriptor)
        try:
            process = await self._start(mouth, sign)
            return 1 if process is None else await self._wait(process)
        finally:
            self._hear(ear)
            self._hear_ready(ready)
            self.last_words = self._tail.lines()
            for descriptor in (ear, ready):
                loop.remove_reader(descriptor)
                os.close(descriptor)

    async def _start(self, mouth: int, sign: int) -> asyncio.subprocess.Process | None:
        listeners = [each.fileno() for each in self._spec.listeners]
        env = dict(self._spec.env) | {READY_FD: str(sign)}
        if listeners:
            env |= {LISTENERS: ",".join(map(str, listeners)), LISTENER_NAME: self._spec.name}
        try:
            return await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", str(GUARD), str(os.getpid())),
                *self._spec.command,
                env=env,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=mouth,
                stderr=mouth,
                start_new_session=True,
                pass_fds=(*listeners, sign),
            )
        except OSError as error:  # out of processes or memory: as if it had ended at once
            self._tail.feed(f"cannot start: {error.strerror or error}\n".encode())
            return None
        finally:
            os.close(mouth)
            os.close(sign)

    async def _wait(self, process: asyncio.subprocess.Process) -> int:
        self.pid = process.pid
        ending = asyncio.create_task(self._end_when_told(process), name=f"end of {self._spec.name}")
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
                        self._echo(f"{self._spec.name:>10} | {line.decode('utf-8', errors='replace').rstrip()}")
            asyncio.get_running_loop().remove_reader(ear)  # the other end is closed: nothing will come

    def _hear_ready(self, descriptor: int) -> None:
        with contextlib.suppress(BlockingIOError):
            if os.read(descriptor, 16):
                self.is_ready = True
            asyncio.get_running_loop().remove_reader(descriptor)

    async def _end_when_told(self, process: asyncio.subprocess.Process) -> None:
        await self.told.wait()
        if self._hurried:
            _signal(process, signal.SIGKILL)
            return
        _signal(process, signal.SIGTERM)
        await self._clock.sleep(self._spec.stop_timeout_s)
        self._tell(f"{self._spec.name} did not stop within {self._spec.stop_timeout_s:g} s and is killed")
        _signal(process, signal.SIGKILL)

    def kill(self) -> None:
        self._hurried = True
        self.told.set()
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
