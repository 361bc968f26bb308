"""One backend process, watched through its shim: its output, its end, and how to stop it."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from corral.contract.codec import Message
from corral.kit.log import get_log
from corral.worker.supervisor.identity import kill_leftovers
from corral.worker.supervisor.link import ShimLink, reap
from corral.worker.supervisor.tail import LogLine, LogTail

log = get_log(__name__)
LAST_LINES = 20


class Exit(Message, frozen=True):
    """How a process ended: `exit.json`."""

    code: int = 0
    signal: int = 0
    stopped_by_worker: bool = msgspec.field(default=False, name="asked")
    error: str = ""  # the command could not be run
    at: str = ""
    lost: bool = False  # its shim was killed, so the exit code is unknown

    def __str__(self) -> str:
        if self.lost:
            return "was lost: the process that watched it was killed"
        if self.error:
            return f"could not be run: {self.error}"
        if self.signal == signal.SIGKILL and not self.stopped_by_worker:
            return "was killed by SIGKILL, as the system does when memory runs out"
        if self.signal:
            return f"was killed by {_signal_name(self.signal)}"
        return f"ended with code {self.code}"

    @staticmethod
    def read(folder: Path) -> Exit | None:
        try:
            return msgspec.json.decode((folder / "exit.json").read_bytes(), type=Exit)
        except (OSError, msgspec.MsgspecError):
            return None


@dataclass
class OutputSeen:
    """How much output the process has written, and when."""

    lines: int = 0
    at: float = 0.0


class BackendProcess:
    """`watch()` must run for as long as this object is used; it returns when the process has ended."""

    def __init__(self, folder: Path, link: ShimLink, tell: Callable[[list[LogLine]], None]) -> None:
        self.folder = folder
        self.identity = link.identity
        self.ended: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()
        self.output = OutputSeen(at=time.monotonic())
        self._link = link
        self._tell = tell
        self._tail = LogTail(folder)
        self._last_errors: deque[LogLine] = deque(maxlen=LAST_LINES)
        self._last_lines: deque[LogLine] = deque(maxlen=LAST_LINES)

    async def watch(self) -> None:
        """Read the log until the process ends. If this is cancelled, the process runs on."""
        try:
            how = None
            await self._read_log()  # output before this worker connected
            while how is None and (messages := await self._link.messages()):
                if any("log" in message for message in messages):
                    await self._read_log()
                how = next((_exit(message["exit"]) for message in messages if "exit" in message), None)
            if how is None:
                how = await self._find_out()
            await self._read_log()
            await self._reap()
            self.ended.set_result(how)
        finally:
            self.detach()

    def detach(self) -> None:
        """Stop watching the process, which runs on."""
        self._link.close()
        if not self.ended.done():
            self.ended.cancel()

    def stop(self, grace_s: float) -> None:
        """SIGTERM now, SIGKILL after the grace period; the shim does both, even if this worker has ended by then."""
        self._link.order(stop=float(grace_s))  # a plain number: `Seconds` of the settings cannot be encoded

    def kill(self) -> None:
        self._link.order(kill=True)

    async def wait(self, timeout_s: float) -> Exit | None:
        """How it ended; None when it still runs after that time."""
        await asyncio.wait([self.ended], timeout=timeout_s)
        return self.ended.result() if self.ended.done() and not self.ended.cancelled() else None

    def last_lines(self) -> list[str]:
        """The last lines of stderr, or of stdout when stderr is empty: part of the error when it fails."""
        return [line.text for line in self._last_errors or self._last_lines]

    async def _read_log(self) -> None:
        try:
            lines = await asyncio.to_thread(self._tail.read)
        except OSError as error:
            log.warning("a log cannot be read", process=self.identity.process_id, error=str(error))
            return
        if not lines:
            return
        self.output = OutputSeen(self.output.lines + len(lines), time.monotonic())
        self._last_lines.extend(lines)
        self._last_errors.extend(line for line in lines if line.stream == "stderr")
        self._tell(lines)

    async def _find_out(self) -> Exit:
        """The shim closed the connection without an exit message: read `exit.json`, or the shim was killed."""
        how = await asyncio.to_thread(Exit.read, self.folder)
        if how is not None:
            return how
        killed = await asyncio.to_thread(kill_leftovers, self.identity)
        log.warning("shim was killed", process=self.identity.process_id, left_behind=len(killed))
        return Exit(lost=True)

    async def _reap(self) -> None:
        deadline = time.monotonic() + 5.0
        # The shim closes its socket, then ends. A blocking wait in a thread could not be cancelled.
        while not reap(self.identity.shim_pid) and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def _exit(content: object) -> Exit:
    with contextlib.suppress(msgspec.ValidationError):
        return msgspec.convert(content, Exit)
    return Exit(lost=True)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
