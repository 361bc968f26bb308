"""Replaces a worker by a new one while requests run: `corral worker reload`, or SIGUSR2
(docs/adr/0008-a-reload-hands-over-sockets.md).

The successor starts, loads all its code, and connects to a socket in the data folder. Only then does the old worker
release the bus, its processes and the folder's lock. It hands over its listening sockets, so no connection is refused,
and serves its own connections until they end. A successor that fails before that changes nothing; when it fails later,
the next start adopts the processes, as after any crash.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import ctypes
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, MutableMapping
from pathlib import Path
from types import TracebackType

from corral.kit.errors import Denied, Failed, NotFound
from corral.kit.log import get_log
from corral.worker.agent.join.identity import holder_of
from corral.worker.reload import keeper
from corral.worker.status import FatalError

log = get_log(__name__)
SOCKET_FILE = "handover.sock"
YOURS, SERVING = b"yours\n", b"serving\n"
MAX_SOCKETS = 16
_PR_SET_PDEATHSIG = 1
_TURNS = 10  # of the loop, after which all signal handlers have run; two or three would do
_THREAD_CHECKS = 2000  # a millisecond apart; the threads have been joined, so only the kernel delays their end


# -- the successor -----------------------------------------------------------------------------------------------------


class Inherited:
    """What the old worker passed on. Call `confirm_serving` when this worker answers requests: the old one stops
    accepting."""

    def __init__(self, listeners: list[socket.socket], connection: socket.socket) -> None:
        self.listeners = listeners
        self._connection = connection

    def confirm_serving(self) -> None:
        with contextlib.suppress(OSError):  # the old worker has ended
            self._connection.sendall(SERVING)
        self._connection.close()


def is_successor(environ: MutableMapping[str, str]) -> bool:
    """Whether a keeper started this process to take over. Removes the variable: our own children are no successors."""
    return environ.pop(keeper.SUCCEED, "") == str(os.getppid())


async def inherit(folder: Path, *, timeout_s: float) -> Inherited | None:
    """Ask the running worker to hand over. None when no worker runs: then this is an ordinary start."""
    return await asyncio.to_thread(_inherit, folder, timeout_s)


def _inherit(folder: Path, timeout_s: float) -> Inherited | None:
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(timeout_s)
    try:
        with _short_path(folder) as path:
            connection.connect(path)
        word, descriptors, _, _ = socket.recv_fds(connection, len(YOURS), MAX_SOCKETS)
    except OSError as error:
        connection.close()
        log.warning("no worker hands over, this is an ordinary start", reason=str(error))
        return None
    listeners = [socket.socket(fileno=descriptor) for descriptor in descriptors]
    if word != YOURS:
        for each in (*listeners, connection):
            each.close()
        raise FatalError("the running worker did not hand over: see its log")
    log.info("taking over", sockets=len(listeners))
    return Inherited(listeners, connection)


# -- the running worker ------------------------------------------------------------------------------------------------


class HandOver:
    """`async with`: a successor may connect while the block runs. `on_successor` is called once, in the loop."""

    def __init__(self, folder: Path, on_successor: Callable[[], None]) -> None:
        self._folder = folder
        self._on_successor = on_successor
        self._listener = socket.socket(socket.AF_UNIX)
        self._connection: socket.socket | None = None
        self._waiting: asyncio.Task[None] | None = None

    async def __aenter__(self) -> HandOver:
        with _short_path(self._folder) as path:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)  # of a worker that has ended: this one holds the folder's lock
            self._listener.bind(path)
            os.chmod(path, 0o600)
        self._listener.listen(1)
        self._listener.setblocking(False)
        self._waiting = asyncio.ensure_future(self._wait())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            await asyncio.gather(self._waiting, return_exceptions=True)
        self._listener.close()
        if self._connection is not None:
            self._connection.close()

    async def _wait(self) -> None:
        self._connection, _ = await asyncio.get_running_loop().sock_accept(self._listener)
        log.info("a successor is ready to take over")
        self._on_successor()

    async def give(self, descriptors: list[int], *, timeout_s: float) -> bool:
        """Pass the sockets on after everything is released. Returns whether the successor serves."""
        connection, loop = self._connection, asyncio.get_running_loop()
        assert connection is not None
        connection.setblocking(False)
        try:
            rights = array.array("i", descriptors)
            connection.sendmsg([YOURS], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
            async with asyncio.timeout(timeout_s):
                return await loop.sock_recv(connection, len(SERVING)) == SERVING
        except (OSError, TimeoutError) as error:
            log.error("the successor does not serve", reason=str(error) or type(error).__name__)
            return False


class Successors:
    """The successors that this process has started, and how this process becomes their keeper."""

    def __init__(self, command: list[str]) -> None:
        """`command`: what a reload starts."""
        self.pids: list[int] = []
        self._keeper = 0  # our own, when we are a successor ourselves
        self.command = command

    def bind_to_keeper(self) -> None:
        """Systemd or a person knows only our keeper: when it is killed, so are we, and the folder is free for the next
        start."""
        self._keeper = os.getppid()
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != self._keeper:
            raise FatalError("the process that started this worker has ended")

    def start(self) -> None:
        """On SIGUSR2: start a successor. A worker that has a keeper leaves that to the keeper, so there is one
        keeper."""
        if self._keeper:
            log.info("reload requested: the keeper starts a successor", keeper=self._keeper)
            os.kill(self._keeper, signal.SIGUSR2)
            return
        try:
            pid = keeper.start_successor(self.command, os.getpid())
        except OSError as error:
            log.error("no successor could be started", reason=str(error))
            return
        log.info("successor started", pid=pid)
        self.pids.append(pid)

    async def watch(self, every_s: float = 0.2) -> None:
        """Log when a successor ends, and reap it."""
        while True:
            self._reap()
            await asyncio.sleep(every_s)

    def _reap(self) -> None:
        for pid in list(self.pids):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                self.pids.remove(pid)
                write = log.warning if status else log.info
                write(
                    "a successor has ended; its own log lines say why", pid=pid, code=os.waitstatus_to_exitcode(status)
                )

    def signal_all(self, number: int) -> None:
        for pid in self.pids:  # not reaped yet, so no other process has these ids
            os.kill(pid, number)

    def dismiss(self) -> None:
        """Stop the successors: this worker does not hand over."""
        self.signal_all(signal.SIGTERM)

    async def keep(self) -> int:
        """Become the keeper of the successors: does not return. Returns an exit code when there is nothing to keep.

        Called in the loop while it handles signals: a signal between the end of the loop and the start of the keeper
        would be lost, and its sender would wait for ever."""
        if self._keeper:
            return 0
        if not self.pids:
            log.error("the successor has ended")
            return 1
        await (
            asyncio.get_running_loop().shutdown_default_executor()
        )  # its threads would receive the signals meant for the keeper
        signal.pthread_sigmask(signal.SIG_BLOCK, keeper.HANDLED)  # survives the exec
        await _last_thread_ended()
        for _ in range(_TURNS):
            await asyncio.sleep(0)  # signals that came before are passed on
        words = [sys.executable, "-I", "-S", keeper.__file__, *map(str, self.pids), "--", *self.command]
        sys.stdout.flush()
        sys.stderr.flush()
        os.execv(sys.executable, words)


async def _last_thread_ended() -> None:
    """A joined thread may exist in the kernel for another moment, with no signal blocked: the kernel delivers a signal
    that the main thread blocks to it, and the signal is lost if the exec happens before the loop handles it."""
    for _ in range(_THREAD_CHECKS):
        if _thread_count() <= 1:
            return
        await asyncio.sleep(0.001)


def _thread_count() -> int:
    """The kernel's count; 0 where it is not available."""
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return 0


# -- the command `corral worker reload` --------------------------------------------------------------------------------


def ask_to_reload(folder: Path, *, timeout_s: float, poll_s: float = 0.05) -> tuple[int, int]:
    """Let a new worker take over the folder. Returns the process ids of both. Raises NotFound, Denied, Failed."""
    before = holder_of(folder)
    if before is None:
        raise NotFound(f"no worker runs in {folder}; name its folder with --data")
    try:
        os.kill(before, signal.SIGUSR2)
    except PermissionError:
        raise Denied(f"the worker (pid {before}) belongs to another user") from None
    except ProcessLookupError:
        raise Failed(f"the worker (pid {before}) has just ended") from None
    until = time.monotonic() + timeout_s
    while time.monotonic() < until:
        after = holder_of(folder)
        if after is not None and after != before:
            return before, after
        time.sleep(poll_s)
    raise Failed(f"no new worker took over from pid {before} within {timeout_s:g} s; the worker's own log says why")


@contextlib.contextmanager
def _short_path(folder: Path) -> Iterator[str]:
    """A short path of the socket: the kernel allows about a hundred bytes, and the folder's path may be longer."""
    if sys.platform != "linux":
        yield str(folder / SOCKET_FILE)
        return
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}/{SOCKET_FILE}"
    finally:
        os.close(descriptor)
