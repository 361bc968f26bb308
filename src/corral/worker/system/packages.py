"""The machine's package manager: Debian's `apt-get`, if the worker is root. It asks no questions and always ends.

A download may be cancelled at any time; unpacking may not, since a killed dpkg leaves packages to be repaired by hand.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from corral.kit.clock import Clock, SystemClock
from corral.kit.errors import Failed
from corral.kit.log import get_log
from corral.kit.subprocesses import minimal_environment, run_program

log = get_log(__name__)

TIMEOUT_S = 600.0
LOCK_PAUSE_S = 2.0
_LOCKED = ("Could not get lock", "Unable to acquire the dpkg frontend lock", "Unable to lock", "is held by process")
_PROXIES = ("http_proxy", "https_proxy", "ftp_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
_ADMIN_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"  # dpkg wants ldconfig on it
_OPTIONS = (
    "-y",
    "-q",
    "--no-install-recommends",
    "-oDPkg::Lock::Timeout=60",
    "-oDpkg::Use-Pty=0",
    "-oDpkg::Options::=--force-confold",
    "-oAcquire::Retries=2",
    "-oAcquire::http::Timeout=30",
    "-oAcquire::https::Timeout=30",
)


@dataclass(frozen=True)
class PackageManager:
    """`enabled`: whether the worker may install packages by itself."""

    enabled: bool = True
    env: Mapping[str, str] = field(default_factory=lambda: os.environ)
    clock: Clock = field(default_factory=SystemClock)
    timeout_s: float = TIMEOUT_S
    is_root: bool = field(default_factory=lambda: os.geteuid() == 0)
    debian_version: Path = Path("/etc/debian_version")

    @property
    def program(self) -> str | None:
        """apt-get, only on Debian and its derivatives: elsewhere packages have other names."""
        return shutil.which("apt-get", path=self._path()) if self.debian_version.exists() else None

    def can_install(self) -> bool:
        return self.enabled and self.is_root and self.program is not None

    def why_not(self) -> str:
        """Why the worker does not install packages itself; empty where apt-get is not available anyway."""
        if self.program is None or self.can_install():
            return ""
        return "the worker is not root" if self.enabled else "this worker runs with --no-install-system-packages"

    def install_command(self, packages: Iterable[str]) -> str:
        return f"apt-get install {' '.join(packages)}"

    def command_for(self, packages: Collection[str], libraries: Collection[str]) -> str:
        """The command for a person on this machine, or an instruction where no command is known."""
        if packages and self.program is not None:
            return f"{'' if self.is_root else 'sudo '}{self.install_command(packages)}"
        hint = f" (on Debian: {' '.join(packages)})" if packages else ""
        return f"install the package that has {' and '.join(libraries)}{hint}"

    async def install(self, packages: Collection[str]) -> None:
        """Raises Failed: with the last output of apt-get, or because another package manager did not end in time."""
        program, end_s = self.program, self.clock.monotonic() + self.timeout_s
        if program is None:
            raise Failed("there is no apt-get on this machine")
        fetch = (program, "install", "--download-only", *_OPTIONS, "--", *packages)
        try:
            await self._run(fetch, end_s)
        except Failed as error:
            log.info("package lists are updated", error=error.message[-200:])
            await self._run((program, "update", *_OPTIONS), end_s)
            await self._run(fetch, end_s)
        # All packages are on the disk: unpacking is short, and continues when the order is cancelled.
        unpack = asyncio.ensure_future(self._run((program, "install", *_OPTIONS, "--", *packages), end_s))
        try:
            await asyncio.shield(unpack)
        except asyncio.CancelledError:
            await asyncio.wait([unpack])
            raise

    async def _run(self, command: tuple[str, ...], end_s: float) -> None:
        while True:
            left_s = end_s - self.clock.monotonic()
            if left_s <= 0:
                raise Failed(f"apt-get did not end within {self.timeout_s:.0f} s")
            try:
                await run_program(
                    command, env=self._environment(), folder=Path("/"), timeout_s=left_s, what=f"apt-get {command[1]}"
                )
            except Failed as error:
                # DPkg::Lock::Timeout waits for dpkg's lock only; those of lists and archives fail at once.
                if not any(words in error.message for words in _LOCKED):
                    raise
                log.info("another package manager is running", command=command[1])
                await self.clock.sleep(LOCK_PAUSE_S)
            else:
                return

    def _environment(self) -> dict[str, str]:
        proxies = {name: self.env[name] for name in _PROXIES if name in self.env}
        fixed = {"DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C", "NEEDRESTART_MODE": "l"}
        return minimal_environment(self.env, PATH=self._path(), **proxies, **fixed)

    def _path(self) -> str:
        return f"{self.env.get('PATH', '')}:{_ADMIN_PATH}".lstrip(":")
