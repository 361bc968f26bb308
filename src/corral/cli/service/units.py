"""The units of systemd for a service. Pure.

The sandbox leaves a worker what backends need: devices, a network, memory that is executable, and files that they may
read. `ProtectClock` is left out for them, because it closes every device that is not listed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from corral.cli.service.service import MARK, RUN_BACKENDS, Service

_ABOUT = {
    "up": "Corral: one endpoint over every machine you own",
    "worker": "Corral worker",
    "controller": "Corral controller",
    "gateway": "Corral gateway",
}
# Longer than what the role itself allows: requests end, then backends, then the controller is told.
STOP_S = {"up": 150, "worker": 120, "controller": 30, "gateway": 45}
_RESTART = {"up": "5", "worker": "10", "controller": "2", "gateway": "500ms"}
# To run backends as another user, to open folders for it, to stop its processes and see which sockets they hold.
CAPABILITIES = "CAP_CHOWN CAP_DAC_OVERRIDE CAP_FOWNER CAP_KILL CAP_SETGID CAP_SETUID CAP_SYS_PTRACE"
_FOR_ANYONE = (
    "NoNewPrivileges=yes",
    "LockPersonality=yes",
    "RestrictNamespaces=yes",
    "RestrictRealtime=yes",
    "RestrictSUIDSGID=yes",
    "RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK",
    "SystemCallArchitectures=native",
)
_OF_THE_SYSTEM = (
    "ProtectSystem=strict",
    "PrivateTmp=yes",
    "ProtectControlGroups=yes",
    "ProtectHostname=yes",
    "ProtectKernelLogs=yes",
    "ProtectKernelModules=yes",
    "ProtectKernelTunables=yes",
)
_WITHOUT_BACKENDS = (
    "CapabilityBoundingSet=",
    "PrivateDevices=yes",
    "PrivateUsers=yes",
    "ProtectClock=yes",
    "ProtectProc=invisible",
    "SystemCallErrorNumber=EPERM",
    "SystemCallFilter=@system-service",
    "SystemCallFilter=~@privileged",
    "UMask=0027",
)
_WITH_BACKENDS = (
    f"CapabilityBoundingSet={CAPABILITIES}",
    "SystemCallErrorNumber=EPERM",
    "SystemCallFilter=~@clock @cpu-emulation @module @mount @obsolete @raw-io @reboot @swap",
)


def unit_files(service: Service) -> dict[str, str]:
    """Name and text of each unit."""
    files = {f"{service.name}.service": "\n".join(_service(service)) + "\n"}
    if service.address:
        files[f"{service.name}.socket"] = "\n".join(_socket(service)) + "\n"
    return files


def _service(service: Service) -> Iterator[str]:
    role = service.role
    yield f"# {MARK} ({service.env_file})."
    yield from ("", "[Unit]", f"Description={_ABOUT[role]}")
    if service.is_system:
        yield from ("Wants=network-online.target", "After=network-online.target")
    yield "StartLimitIntervalSec=0"  # a service that keeps being killed is still wanted back
    yield from ("", "[Service]", "Type=exec")
    if service.user:
        yield f"User={service.user}"
    for name, value in service.environment.items():
        yield f"Environment={_quote(f'{name}={value}')}"
    yield f"EnvironmentFile=-{_escape(str(service.env_file))}"
    program = _quote(str(service.program).replace("$", "$$"))  # only commands have variables
    yield f"ExecStart={program} {role}"
    if role == "worker":
        yield f"ExecReload={program} worker reload"
    # Only the main process is told to stop, and it stops its parts in order. Backends of a worker that crashed go on,
    # and the next start adopts them; other roles leave nothing behind.
    yield f"KillMode={'process' if role in RUN_BACKENDS else 'mixed'}"
    yield from (f"TimeoutStopSec={STOP_S[role]}", "Restart=always", f"RestartSec={_RESTART[role]}")
    yield "LimitNOFILE=65536"
    if role == "controller" and service.is_system:
        yield from ("RuntimeDirectory=corral", "RuntimeDirectoryMode=0700")
    yield from _FOR_ANYONE
    if service.is_system:
        yield from _OF_THE_SYSTEM
        yield from _WITH_BACKENDS if role in RUN_BACKENDS else _WITHOUT_BACKENDS
        yield from _folders(service)
    yield from ("", "[Install]", f"WantedBy={'multi-user' if service.is_system else 'default'}.target")


def _folders(service: Service) -> Iterator[str]:
    # Models of a worker, and the programs themselves, may lie in somebody's home.
    at_home = service.role in RUN_BACKENDS or _is_at_home(service.program)
    yield f"ProtectHome={'read-only' if at_home else 'yes'}"
    if service.role != "gateway":
        yield f"ReadWritePaths={_quote(str(service.data))}"
    if service.role == "up":
        yield f"ReadWritePaths={_quote(f'-{service.config}')}"
    current = service.program.parent.parent
    if service.role in RUN_BACKENDS and current.name == "current":
        # `corral fleet upgrade` builds the next version beside this one.
        yield f"ReadWritePaths={_quote(f'-{current.parent}')}"


def _is_at_home(path: Path) -> bool:
    return any(path.is_relative_to(folder) for folder in ("/home", "/root", "/run/user"))


def _socket(service: Service) -> Iterator[str]:
    yield f"# {MARK}."
    yield from ("", "[Unit]", f"Description=Public port of {service.name}")
    yield from ("", "[Socket]", f"ListenStream={service.address}", "FileDescriptorName=gateway")
    yield from ("Backlog=2048", "NoDelay=yes", "", "[Install]", "WantedBy=sockets.target")


def _quote(text: str) -> str:
    escaped = _escape(text)
    return f'"{escaped}"' if " " in escaped else escaped


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
