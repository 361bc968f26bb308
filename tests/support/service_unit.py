"""Runs what a unit of systemd says, where there is no systemd: its environment, commands, capabilities and folders.

Not emulated: system call filters, namespaces of devices and processes, and users.
"""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

from tests.support.processes import Process

# Everything is read-only but the folders of the unit, and /tmp is its own: mounts of a namespace that ends with it.
_SANDBOX = """
set -e
root=$1; shift
mount --bind "$root" /mnt
mount -t tmpfs -o mode=1777 tmpfs /tmp
mkdir -p "$root"
mount --bind /mnt "$root"
while [ "$1" != -- ]; do mount --bind "$1" "$1"; shift; done
shift
mount -o remount,bind,ro "$root"
mount -o remount,bind,ro /
exec "$@"
"""


class ServiceUnit:
    def __init__(self, text: str, root: Path) -> None:
        """`root`: a folder that has all files of the test, since /tmp is empty inside."""
        self._root = root
        self._lines = [line.partition("=") for line in text.splitlines() if "=" in line and line[0] not in "#["]

    def values(self, name: str) -> list[str]:
        return [value for key, _, value in self._lines if key == name]

    def value(self, name: str) -> str:
        (found,) = self.values(name)
        return found

    def start(self, log: Path) -> Process:
        assert self.value("KillMode") == "process"
        return Process(self._sandboxed("ExecStart"), self._environment(), log)

    def reload(self) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self._sandboxed("ExecReload"), env=self._environment(), capture_output=True, text=True, timeout=60
        )

    @property
    def stop_timeout_s(self) -> float:
        return float(self.value("TimeoutStopSec"))

    def _environment(self) -> dict[str, str]:
        """What systemd gives: nothing of the caller's."""
        found = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}
        found |= dict(shlex.split(value)[0].split("=", 1) for value in self.values("Environment"))
        file = Path(self.value("EnvironmentFile").removeprefix("-"))
        for line in file.read_text().splitlines() if file.exists() else ():
            if line and not line.startswith("#"):
                name, _, value = line.partition("=")
                found[name] = shlex.split(value)[0] if value else ""
        return found

    def _sandboxed(self, command: str) -> list[str]:
        capabilities = [f"+{name.removeprefix('CAP_').lower()}" for name in self.value("CapabilityBoundingSet").split()]
        writable = [path for path in self.values("ReadWritePaths") if not path.startswith("-")]
        assert (self.value("ProtectSystem"), self.value("NoNewPrivileges")) == ("strict", "yes")
        assert os.geteuid() == 0
        return [
            *("unshare", "--mount", "--propagation", "private", "sh", "-c", _SANDBOX, "sandbox"),
            *(str(self._root), *writable, "--"),
            *("setpriv", "--no-new-privs", "--inh-caps=-all", f"--bounding-set=-all,{','.join(capabilities)}"),
            *shlex.split(self.value(command)),
        ]
