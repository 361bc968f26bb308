"""A machine with systemd that really boots: a folder with a Debian, as a container of systemd-nspawn. Needs root.

It has a network of its own with nothing but loopback. What it writes stays over a reboot.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from pathlib import Path

from tests.support.processes import Process
from tests.support.waiting import wait_for

BOOT_S = 120.0
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class BootedMachine:
    def __init__(self, root: Path, log: Path) -> None:
        self._root = root
        self._log = log
        self._nspawn: Process | None = None

    def boot(self) -> None:
        """Returns when everything that starts with the machine has been started."""
        name = f"corral-test-{os.getpid()}"
        options = ("--register=no", "--keep-unit", "--private-network", "--link-journal=no", "--console=pipe")
        command = ["systemd-nspawn", "--quiet", f"--directory={self._root}", f"--machine={name}", "--boot", *options]
        self._nspawn = Process(command, {"PATH": os.environ["PATH"]}, self._log)

        def booted() -> bool:
            assert self._nspawn is not None
            if not self._nspawn.running:
                raise RuntimeError(f"it does not boot:\n{self._nspawn.output()[-3000:]}")
            state = self.run("systemctl", "is-system-running", check=False).strip()
            assert state in ("running", "degraded"), state
            return True

        wait_for(booted, "booted machine", BOOT_S)

    def run(self, *command: str, check: bool = True, timeout_s: float = 120) -> str:
        """As root, with a root shell's environment."""
        inside = ("nsenter", f"--target={self._init()}", "--mount", "--pid", "--uts", "--ipc", "--net", "--cgroup")
        env = ("env", "-i", "--chdir=/", f"PATH={_PATH}", "HOME=/root", "LANG=C.UTF-8", "TERM=dumb", "NO_COLOR=1")
        ran = subprocess.run([*inside, *env, *command], capture_output=True, text=True, timeout=timeout_s)
        assert ran.returncode == 0 or not check, f"{command}: {ran.stdout}{ran.stderr}"
        return ran.stdout

    def shut_down(self) -> None:
        """In order, as `poweroff` does."""
        self.run("systemctl", "poweroff", check=False)
        assert self._nspawn is not None
        self._nspawn.wait(200)

    def pull_the_plug(self) -> None:
        with contextlib.suppress(ProcessLookupError, IndexError, FileNotFoundError):
            os.kill(self._init(), signal.SIGKILL)
        assert self._nspawn is not None
        self._nspawn.wait(60)

    def close(self) -> None:
        if self._nspawn is not None and self._nspawn.running:
            self.pull_the_plug()

    def _init(self) -> int:
        assert self._nspawn is not None
        children = Path(f"/proc/{self._nspawn.pid}/task/{self._nspawn.pid}/children").read_text().split()
        return int(children[0])
