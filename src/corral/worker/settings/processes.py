"""Settings of backend processes: where they live, which ports they get, as whom they run, how long a step may take."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

from corral.kit.settings import Seconds, at_least_one, positive, setting


def _log_size(value: int) -> str | None:
    return None if value >= 65536 else f"{value} is too small for a log file; give at least 65536 bytes"


@dataclass(frozen=True)
class PortRange:
    """`begin` is where growing starts; it goes round. 0: at the first."""

    first: int = 20000
    last: int = 29999
    begin: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.first <= self.last <= 65535:
            raise ValueError(f"{self.first}-{self.last} is no range of ports")

    def spread(self, who: str) -> PortRange:
        """The same range, begun elsewhere by everybody: two workers of one machine hardly ever try the same port."""
        return PortRange(self.first, self.last, self.first + crc32(who.encode()) % (self.last - self.first + 1))

    def __contains__(self, port: int) -> bool:
        return self.first <= port <= self.last

    def __iter__(self) -> Iterator[int]:
        begin = self.begin if self.begin in self else self.first
        yield from range(begin, self.last + 1)
        yield from range(self.first, begin)


def parse_port_range(text: str) -> PortRange:
    """`20000-29999`. Raises ValueError with a sentence."""
    first, hyphen, last = text.strip().partition("-")
    if not (hyphen and first.strip().isdecimal() and last.strip().isdecimal()):
        raise ValueError(f"{text!r} is no range of ports; give one such as 20000-29999")
    return PortRange(int(first), int(last))


def _port_range(value: str) -> str | None:
    try:
        parse_port_range(value)
    except ValueError as error:
        return str(error)
    return None


@dataclass(frozen=True)
class ProcessSettings:
    processes: Path | None = setting(
        "folder of running backend processes and their logs; empty = processes in the data folder", default=None
    )
    backend_ports: str = setting(
        "range of ports on loopback for backends: FIRST-LAST", default="20000-29999", check=_port_range
    )
    backend_user: str = setting(
        "user that backends run as, by name or number. Empty: a user without rights where the worker is root "
        "(corral-backend, or a free number), else the worker's own",
        default="",
        parse=str.strip,
    )
    backend_env: tuple[str, ...] = setting(
        "additional variables of the worker's environment that backends get", default=()
    )
    backend_grace_s: Seconds = setting(
        "time between SIGTERM and SIGKILL when a backend is stopped", default=Seconds(15), check=positive
    )
    backend_kill_wait_s: Seconds = setting(
        "how long a killed backend may take to end", default=Seconds(10), check=positive, advanced=True
    )
    backend_free_timeout_s: Seconds = setting(
        "how long a backend may take to release its memory before it is stopped",
        default=Seconds(5),
        check=positive,
        advanced=True,
    )
    backend_poll_s: Seconds = setting(
        "interval between readiness checks of a backend that starts",
        default=Seconds(0.2),
        check=positive,
        advanced=True,
    )
    backend_probe_timeout_s: Seconds = setting(
        "timeout of one readiness check", default=Seconds(2), check=positive, advanced=True
    )
    backend_shim_timeout_s: Seconds = setting(
        "timeout for the start of a backend's shim", default=Seconds(20), check=positive, advanced=True
    )
    backend_port_rest_s: Seconds = setting("how long a released port stays unused", default=Seconds(15), advanced=True)
    backend_port_claim_s: Seconds = setting(
        "how long a released port is reserved for the model that used it", default=Seconds(300), advanced=True
    )
    backend_log_bytes: int = setting(
        "size in bytes at which a backend's log file is rotated", default=8 << 20, check=_log_size
    )
    backend_log_files: int = setting("log files kept of one backend process", default=4, check=at_least_one)
    backend_log_lines: int = setting(
        "log lines of each process kept in memory", default=1000, check=at_least_one, advanced=True
    )
    backend_logs_kept: int = setting(
        "ended processes of each model whose logs are kept on the disk", default=3, check=at_least_one, advanced=True
    )

    @property
    def port_range(self) -> PortRange:
        return parse_port_range(self.backend_ports)
