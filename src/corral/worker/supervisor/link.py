"""The worker's connection to a shim, and how a shim is started."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import struct
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from corral.kit.errors import Failed
from corral.worker.supervisor import shim
from corral.worker.supervisor.identity import Identity

_SHIM_ENV = ("PATH", "HOME", "LANG", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "TMPDIR")
_READY = 3  # the descriptor by which a shim tells that it is there
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
    child, so that we reap it, and in a session of its own, so that nothing meant for us reaches it."""
    waiting, ready = os.pipe()
    pid = 0
    try:
        pid = await asyncio.to_thread(_spawn, folder, ready)
        os.close(ready)
        ready = -1
        async with asyncio.timeout(timeout_s):
            await _end_of_file(waiting)
    except TimeoutError as error:
        os.kill(pid, signal.SIGKILL)  # our own child, not buried yet: its number cannot be another's
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


async def _end_of_file(descriptor: int) -> None:
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)


def reap(pid: int) -> bool:
    """Reap a shim that has ended. False while it runs; True for a shim that is no child of this process."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True
