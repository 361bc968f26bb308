"""A worker replaced by a new one while requests run: `corral worker reload`, or SIGUSR2
(docs/adr/0008-a-reload-hands-over-sockets.md).

The successor is started, loads all its code, and connects to a socket in the data folder. Only then does the old worker
let go: of the bus, of its processes, of the folder's lock. It hands over the very sockets it listens on, so no
connection is ever refused, and serves its own connections until they end. A successor that fails before that costs
nothing; what a worker does when one fails afterwards is the same as after any crash: the next start adopts.
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
from corral.worker import keeper
from corral.worker.agent.identity import holder_of
from corral.worker.agent.stop import CannotGoOn

log = get_log(__name__)
SOCKET_FILE = "handover.sock"
YOURS, SERVING = b"yours\n", b"serving\n"
MOST_SOCKETS = 16
_PR_SET_PDEATHSIG = 1
_TURNS = 10  # of the loop, by which it has done whatever signals asked for; two or three would do
_THREAD_CHECKS = 2000  # a millisecond apart; the threads have been joined, so only the kernel is in the way


# -- the successor ---------------------------------------------------------------------------------------------------


class Inherited:
    """What the old worker gave us. `serving()` once requests are answered here: the old one accepts none from then."""

    def __init__(self, listeners: list[socket.socket], line: socket.socket) -> None:
        self.listeners = listeners
        self._line = line

    def serving(self) -> None:
        with contextlib.suppress(OSError):  # the old one is gone: then nobody waits for this
            self._line.sendall(SERVING)
        self._line.close()


def is_successor(environ: MutableMapping[str, str]) -> bool:
    """And remember it no longer: what we start is nobody's successor."""
    return environ.pop(keeper.SUCCEED, "") == str(os.getppid())


async def inherit(folder: Path, *, timeout_s: float) -> Inherited | None:
    """Ask the worker at work to hand over. None when there is none (any more): then this is an ordinary start."""
    return await asyncio.to_thread(_inherit, folder, timeout_s)


def _inherit(folder: Path, timeout_s: float) -> Inherited | None:
    line = socket.socket(socket.AF_UNIX)
    line.settimeout(timeout_s)
    try:
        with _within_reach(folder) as path:
            line.connect(path)
        word, descriptors, _, _ = socket.recv_fds(line, len(YOURS), MOST_SOCKETS)
    except OSError as error:
        line.close()
        log.warning("nobody hands over, this is an ordinary start", reason=str(error))
        return None
    listeners = [socket.socket(fileno=descriptor) for descriptor in descriptors]
    if word != YOURS:
        for each in (*listeners, line):
            each.close()
        raise CannotGoOn("the worker at work did not hand over: see its log")
    log.info("taking over", sockets=len(listeners))
    return Inherited(listeners, line)


# -- the worker at work ----------------------------------------------------------------------------------------------


class HandOver:
    """`async with`: a successor may ask while the block runs. `asked` is called once, in the loop."""

    def __init__(self, folder: Path, asked: Callable[[], None]) -> None:
        self._folder = folder
        self._asked = asked
        self._door = socket.socket(socket.AF_UNIX)
        self._line: socket.socket | None = None
        self._waiting: asyncio.Task[None] | None = None

    @property
    def is_asked(self) -> bool:
        return self._line is not None

    async def __aenter__(self) -> HandOver:
        with _within_reach(self._folder) as path:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)  # of a worker that is gone: we hold the folder
            self._door.bind(path)
            os.chmod(path, 0o600)
        self._door.listen(1)
        self._door.setblocking(False)
        self._waiting = asyncio.ensure_future(self._wait())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            await asyncio.gather(self._waiting, return_exceptions=True)
        self._door.close()
        if self._line is not None:
            self._line.close()

    async def _wait(self) -> None:
        self._line, _ = await asyncio.get_running_loop().sock_accept(self._door)
        log.info("a successor is ready to take over")
        self._asked()

    async def give(self, descriptors: list[int], *, timeout_s: float) -> bool:
        """All is let go of: it is the successor's. Whether it serves."""
        line, loop = self._line, asyncio.get_running_loop()
        assert line is not None
        line.setblocking(False)
        try:
            rights = array.array("i", descriptors)
            line.sendmsg([YOURS], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
            async with asyncio.timeout(timeout_s):
                return await loop.sock_recv(line, len(SERVING)) == SERVING
        except (OSError, TimeoutError) as error:
            log.error("the successor does not serve", reason=str(error) or type(error).__name__)
            return False


class Successors:
    """The workers this process has started in its place, and what becomes of this process when they work."""

    def __init__(self) -> None:
        self.pids: list[int] = []
        self._keeper = 0  # our own, when we are a successor ourselves
        self.command = [sys.executable, *sys.orig_argv[1:]]

    def bind_to_keeper(self) -> None:
        """Our keeper is who people know: when it is killed, so are we, and the next start finds the folder free."""
        self._keeper = os.getppid()
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != self._keeper:
            raise CannotGoOn("whoever started this worker is gone")

    def start(self) -> None:
        """On SIGUSR2. A worker that has a keeper leaves it to the keeper, so that nobody piles up."""
        if self._keeper:
            log.info("asked to reload: the keeper starts a successor", keeper=self._keeper)
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
        """Tell when one has ended, and take its remains."""
        while True:
            self._bury()
            await asyncio.sleep(every_s)

    def _bury(self) -> None:
        for pid in list(self.pids):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                self.pids.remove(pid)
                tell = log.warning if status else log.info
                tell("a successor has ended; its own lines say why", pid=pid, code=os.waitstatus_to_exitcode(status))

    def tell(self, number: int) -> None:
        for pid in self.pids:  # not buried yet, so their numbers are theirs
            os.kill(pid, number)

    def send_away(self) -> None:
        """Nobody hands over to them any more."""
        self.tell(signal.SIGTERM)

    async def keep(self) -> int:
        """Become the keeper of those that run: does not return. The exit code where that is not ours to do.

        In the loop, as long as that hears signals: between its end and the keeper's beginning one would be lost, and
        whoever asked us to stop would wait for ever."""
        if self._keeper:
            return 0
        if not self.pids:
            log.error("the successor is gone")
            return 1
        await asyncio.get_running_loop().shutdown_default_executor()  # its threads would take what waits for the keeper
        signal.pthread_sigmask(signal.SIG_BLOCK, keeper.HEARD)  # stays so through the change
        await _last_thread_ended()
        for _ in range(_TURNS):
            await asyncio.sleep(0)  # what came before that is passed on from here
        words = [sys.executable, "-I", "-S", keeper.__file__, *map(str, self.pids), "--", *self.command]
        sys.stdout.flush()
        sys.stderr.flush()
        os.execv(sys.executable, words)


async def _last_thread_ended() -> None:
    """A thread that was joined may live on in the kernel for a moment, with no signal blocked: a signal that the main
    thread blocks is delivered to it, and is lost if the program changes before the loop has heard of it."""
    for _ in range(_THREAD_CHECKS):
        if _thread_count() <= 1:
            return
        await asyncio.sleep(0.001)


def _thread_count() -> int:
    """As the kernel counts; 0 where it does not say."""
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return 0


# -- whoever asks for it ---------------------------------------------------------------------------------------------


def ask_to_reload(folder: Path, *, timeout_s: float, poll_s: float = 0.05) -> tuple[int, int]:
    """Let a new worker take over the folder; the process ids of both. Raises NotFound, Denied, Failed."""
    before = holder_of(folder)
    if before is None:
        raise NotFound(f"no worker is at work in {folder}; name its folder with --data")
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
def _within_reach(folder: Path) -> Iterator[str]:
    """The socket by a path that is short enough: the kernel takes about a hundred bytes, data folders may be deeper."""
    if sys.platform != "linux":
        yield str(folder / SOCKET_FILE)
        return
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}/{SOCKET_FILE}"
    finally:
        os.close(descriptor)
