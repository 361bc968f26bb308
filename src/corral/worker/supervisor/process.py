"""One backend process, watched through its shim: how the shim is started, the connection to it, the output and the end
of the process, and how to stop it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import struct
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from corral.contract.codec import Message
from corral.kit.errors import Failed
from corral.kit.log import get_log
from corral.kit.tasks import wait_readable
from corral.worker.supervisor import shim
from corral.worker.supervisor.identity import Identity, kill_leftovers
from corral.worker.supervisor.tail import LogLine, LogTail

log = get_log(__name__)
LAST_LINES = 20
_SHIM_ENV = ("PATH", "HOME", "LANG", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "TMPDIR")
_READY = 3  # the descriptor by which a shim reports that its socket answers
_PIECE = 64 * 1024


class ShimLink:
    """One connection to a shim that has identified itself."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._rest = b""
        self._ahead: list[dict[str, Any]] = []
        self.identity = Identity()

    @staticmethod
    async def open(folder: Path, *, timeout_s: float) -> ShimLink:
        """Raises Failed when no shim answers, or another process than the shim."""
        try:
            async with asyncio.timeout(timeout_s):
                with _short_path(folder) as path:
                    link = ShimLink(*await asyncio.open_unix_connection(path))
                try:
                    await link._greet(folder.name)
                except BaseException:
                    link.close()
                    raise
                return link
        except (OSError, TimeoutError) as error:
            raise Failed(f"the shim of {folder.name} does not answer: {error!r}") from error

    async def _greet(self, name: str) -> None:
        first, *self._ahead = await self.messages() or [{}]
        try:
            self.identity = msgspec.convert(first.get("hello"), Identity)
        except msgspec.ValidationError as error:
            raise Failed(f"the shim of {name} does not say who it is: {error}") from error
        peer = _peer_pid(self._writer.get_extra_info("socket"))
        if peer not in (None, self.identity.shim_pid):
            raise Failed(f"process {peer} answers in place of the shim {self.identity.shim_pid} of {name}")

    async def messages(self) -> list[dict[str, Any]]:
        """Messages since the last call; several at once come as one list. Empty when the shim has ended."""
        if self._ahead:
            ahead, self._ahead = self._ahead, []
            return ahead
        while True:
            try:
                data = await self._reader.read(_PIECE)
            except OSError:
                data = b""
            if not data:
                return []
            *lines, self._rest = (self._rest + data).split(b"\n")
            if lines:
                return [_word(line) for line in lines]

    def order(self, **what: object) -> None:
        """Send an order. Not awaited: `messages` notices when the shim has ended."""
        if not self._writer.is_closing():
            self._writer.write(msgspec.json.encode(what) + b"\n")

    def close(self) -> None:
        self._writer.close()


def _word(line: bytes) -> dict[str, Any]:
    try:
        word = msgspec.json.decode(line)
    except msgspec.DecodeError:
        return {}
    return word if isinstance(word, dict) else {}


def _peer_pid(sock: socket.socket) -> int | None:
    """The process at the other end according to the kernel; None where that is not available."""
    if not hasattr(socket, "SO_PEERCRED"):
        return None
    pid, _, _ = struct.unpack("iII", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(pid)


@contextlib.contextmanager
def _short_path(folder: Path) -> Iterator[str]:
    """A short path of the socket: the kernel allows about a hundred bytes, and the folder's path may be longer."""
    if sys.platform == "linux":
        descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY)
        try:
            yield f"/proc/self/fd/{descriptor}/socket"
        finally:
            os.close(descriptor)
    else:
        with tempfile.TemporaryDirectory(dir="/tmp") as short:
            os.symlink(folder, f"{short}/s")
            yield f"{short}/s/socket"


async def spawn_shim(folder: Path, *, timeout_s: float) -> int:
    """Start the shim of a folder that holds its `spec.json`; returns its process id when its socket answers. It is our
    child, so that we reap it, and in a session of its own, so that signals for the worker do not reach it."""
    waiting, ready = os.pipe()
    pid = 0
    try:
        pid = await asyncio.to_thread(_spawn, folder, ready)
        os.close(ready)
        ready = -1
        async with asyncio.timeout(timeout_s):
            await wait_readable(waiting)
    except TimeoutError as error:
        os.kill(pid, signal.SIGKILL)  # our own child, not reaped yet: its id cannot be another process's
        await asyncio.to_thread(os.waitpid, pid, 0)
        raise Failed(f"the shim of {folder.name} said nothing within {timeout_s} s") from error
    finally:
        for descriptor in (waiting, ready):
            if descriptor >= 0:
                os.close(descriptor)
    return pid


def _spawn(folder: Path, ready: int) -> int:
    errors = str(folder / "shim.err")
    return os.posix_spawn(
        sys.executable,
        [sys.executable, "-I", "-S", shim.__file__, str(folder), str(_READY)],
        {name: os.environ[name] for name in _SHIM_ENV if name in os.environ},
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600),
            (os.POSIX_SPAWN_DUP2, 1, 2),
            (os.POSIX_SPAWN_DUP2, ready, _READY),
        ],
        setsigmask=[],
        # At once: Ctrl-C in a terminal is for the worker. Elsewhere the shim does it itself, a moment later.
        setsid=sys.platform == "linux",
    )


def reap(pid: int) -> bool:
    """Reap a shim that has ended. False while it runs; True for a shim that is no child of this process."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True


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
