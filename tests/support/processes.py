"""Free ports, and processes that never outlive their test."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

CORRAL = (sys.executable, "-m", "corral.cli.main")

# Below those the system hands out by itself, which any connection may take, and below those workers give to backends.
# Apart from each other, as a worker of LocalAI's kind takes the one before and some after.
_PORTS = range(12_002, 20_000, 8)
_LAST_PORT = Path(tempfile.gettempdir()) / f"corral-tests-last-port-{os.getuid()}"


def free_port() -> int:
    """One that is not in use, and that no other test of anybody here is given for a long while."""
    with open(os.open(_LAST_PORT, os.O_RDWR | os.O_CREAT, 0o600), "r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        told = file.read()
        turn = int(told) if told.isdigit() else secrets.randbelow(len(_PORTS))
        while True:
            turn = (turn + 1) % len(_PORTS)
            with socket.socket() as probe, contextlib.suppress(OSError):
                probe.bind(("0.0.0.0", _PORTS[turn]))
                break
        file.seek(0)
        file.truncate()
        file.write(str(turn))
        return _PORTS[turn]


def kept_port() -> socket.socket:
    """A port of 127.0.0.1 that nobody else is given while this is open, for whoever listens there now and then. While
    nobody does, connections are refused."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as whoever listens there has it
    held.bind(("127.0.0.1", 0))
    return held


class Process:
    """A child with its output in a file. `stop` is kind at first; `kill` is not."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        self.command = list(command)
        self.log = log
        with log.open("ab") as out:
            self._popen = subprocess.Popen(
                self.command, env=dict(env), stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT
            )

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def running(self) -> bool:
        return self._popen.poll() is None

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def wait(self, timeout_s: float = 40.0) -> int:
        try:
            return self._popen.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            raise AssertionError(
                f"{self.command} did not end within {timeout_s} s:\n{self.output()[-3000:]}"
            ) from error

    def signal(self, number: int) -> None:
        self._popen.send_signal(number)

    def stop(self, timeout_s: float = 40.0) -> int:
        if self.running:
            self.signal(signal.SIGTERM)
        return self.wait(timeout_s)

    def kill(self) -> None:
        self._popen.kill()
        self._popen.wait(30)

    def close(self) -> None:
        """Whatever state it is in, it is gone afterwards."""
        if self.running:
            self.signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._popen.wait(30)
        if self.running:
            self.kill()


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def clean_env(home: Path, **more: str) -> dict[str, str]:
    """The environment of a person who has set nothing of ours, at home in a folder of the test."""
    env = {key: value for key, value in os.environ.items() if not key.startswith(("CORRAL_", "LOCALAI_"))}
    return env | {"HOME": str(home), "XDG_CONFIG_HOME": str(home / ".config"), "NO_COLOR": "1", "TERM": "dumb"} | more
