"""systemd and launchd: write the files of a service, start, stop and remove it, and say how it is."""

from __future__ import annotations

import os
import plistlib
import pwd
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from corral.cli.service.plists import label, log_file, property_list
from corral.cli.service.service import MARK, Service
from corral.cli.service.units import unit_files
from corral.kit.errors import Conflict, Failed
from corral.kit.files import write_atomically
from corral.kit.subprocesses import CapturedOutput, capture_blocking

_TIMEOUT_S = 180.0  # a worker that stops lets its requests end
BOOTED = Path("/run/systemd/system")  # is there where systemd is the init system
Files = Mapping[Path, bytes]


@dataclass(frozen=True)
class ServiceStatus:
    role: str
    name: str
    is_installed: bool
    is_enabled: bool = False  # starts with the machine
    state: str = "not installed"
    pid: int = 0
    file: str = ""
    logs: str = ""  # the command that shows them


class Manager(Protocol):
    def files(self, service: Service) -> Files: ...

    def unavailable(self) -> str:
        """Why this system runs no services; empty if it does."""

    def start(self, service: Service) -> None: ...

    def stop(self, service: Service) -> None: ...

    def status(self, service: Service) -> ServiceStatus: ...


def find_manager() -> Manager:
    return Launchd() if sys.platform == "darwin" else Systemd()


def write_files(files: Files) -> None:
    """Raises Conflict, before anything is written, where somebody else's file has the name."""
    refuse_foreign(files)
    for path, data in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, data)


def refuse_foreign(files: Files) -> None:
    for path in files:
        if path.exists() and MARK not in path.read_text(errors="replace"):
            raise Conflict(f"{path} is not of `corral service`: move it away first")


def make_users(names: tuple[str, ...]) -> None:
    """The system users that do not exist yet."""
    for name in names:
        try:
            pwd.getpwnam(name)
        except KeyError:
            shell = shutil.which("nologin", path="/usr/sbin:/sbin:/usr/bin") or "/bin/false"
            _run("useradd", "--system", "--user-group", "--no-create-home", "--home-dir", "/", "--shell", shell, name)


class Systemd:
    def files(self, service: Service) -> Files:
        folder = (
            Path("/etc/systemd/system")
            if service.is_system
            else Path(os.environ.get("XDG_CONFIG_HOME") or service.home / ".config") / "systemd" / "user"
        )
        return {folder / name: text.encode() for name, text in unit_files(service).items()}

    def unavailable(self) -> str:
        if shutil.which("systemctl") is None or not BOOTED.is_dir():
            return "systemd does not run on this machine"
        return ""

    def start(self, service: Service) -> None:
        self._control(service, "daemon-reload")
        # Restarted, so that a service that runs already gets the new files.
        names = [path.name for path in self.files(service)]
        self._control(service, "enable", *names)
        self._control(service, "restart", *reversed(names))
        if not service.is_system:
            _attempt("loginctl", "enable-linger")  # the user's services then start with the machine

    def stop(self, service: Service) -> None:
        names = [path.name for path in self.files(service) if path.exists()]
        self._control(service, "disable", "--now", *reversed(names))
        for path in self.files(service):
            path.unlink(missing_ok=True)
        self._control(service, "daemon-reload")

    def status(self, service: Service) -> ServiceStatus:
        (file, *_) = self.files(service)
        scope = [] if service.is_system else ["--user"]
        if not file.exists():
            return ServiceStatus(service.role, service.name, False)
        properties = "--property=ActiveState,SubState,UnitFileState,MainPID"
        shown = _attempt("systemctl", *scope, "show", properties, file.name)
        found = dict(line.split("=", 1) for line in shown.stdout.splitlines() if "=" in line)
        pid = found.get("MainPID", "")
        return ServiceStatus(
            service.role,
            service.name,
            True,
            found.get("UnitFileState", "") == "enabled",
            found.get("ActiveState", "unknown"),
            int(pid) if pid.isdigit() else 0,
            str(file),
            f"journalctl {'' if service.is_system else '--user '}-u {service.name}",
        )

    def _control(self, service: Service, *words: str) -> None:
        _run("systemctl", *([] if service.is_system else ["--user"]), *words)


class Launchd:
    def files(self, service: Service) -> Files:
        folder = Path("/Library/LaunchDaemons") if service.is_system else service.home / "Library" / "LaunchAgents"
        return {folder / f"{label(service)}.plist": property_list(service)}

    def unavailable(self) -> str:
        return "" if shutil.which("launchctl") else "launchd does not run on this machine"

    def start(self, service: Service) -> None:
        log_file(service).parent.mkdir(parents=True, exist_ok=True)
        (file,) = self.files(service)
        _attempt("launchctl", "bootout", self._target(service))  # of an earlier installation
        _run("launchctl", "enable", self._target(service))
        _run("launchctl", "bootstrap", self._domain(service), str(file))

    def stop(self, service: Service) -> None:
        (file,) = self.files(service)
        _attempt("launchctl", "bootout", self._target(service))
        file.unlink(missing_ok=True)

    def status(self, service: Service) -> ServiceStatus:
        (file,) = self.files(service)
        if not file.exists():
            return ServiceStatus(service.role, service.name, False)
        shown = _attempt("launchctl", "print", self._target(service))
        found = dict(line.strip().split(" = ", 1) for line in shown.stdout.splitlines() if " = " in line)
        pid = found.get("pid", "")
        state = found.get("state", "inactive")
        with file.open("rb") as opened:
            is_enabled = bool(plistlib.load(opened).get("RunAtLoad"))
        return ServiceStatus(
            service.role,
            service.name,
            True,
            is_enabled,
            "active" if state == "running" else state,
            int(pid) if pid.isdigit() else 0,
            str(file),
            f"tail -f {log_file(service)}",
        )

    def _domain(self, service: Service) -> str:
        return "system" if service.is_system else f"gui/{os.getuid()}"

    def _target(self, service: Service) -> str:
        return f"{self._domain(service)}/{label(service)}"


def _attempt(*command: str) -> CapturedOutput:
    try:
        return capture_blocking(command, timeout_s=_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return CapturedOutput(1, "", str(error))


def _run(*command: str) -> None:
    """Raises Failed with what the program said."""
    ran = _attempt(*command)
    if ran.status != 0:
        said = " ".join((ran.stderr or ran.stdout).split())[:500]
        raise Failed(f"`{' '.join(command)}` failed: {said or f'exit code {ran.status}'}")
