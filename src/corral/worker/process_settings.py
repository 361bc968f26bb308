"""Settings of backend processes: where they live, which ports they get, as whom they run, how long a step may take."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from corral.kit.settings import Seconds, at_least_one, positive, setting
from corral.worker.supervisor.ports import PortRange
from corral.worker.supervisor.spec import SupervisorSettings


def _log_size(value: int) -> str | None:
    return None if value >= 65536 else f"{value} is too small for a log file; give at least 65536 bytes"


def read_port_range(text: str) -> PortRange:
    """`20000-29999`. Raises ValueError with a sentence."""
    first, hyphen, last = text.strip().partition("-")
    if not (hyphen and first.strip().isdecimal() and last.strip().isdecimal()):
        raise ValueError(f"{text!r} is no range of ports; give one such as 20000-29999")
    return PortRange(int(first), int(last))


def _port_range(value: str) -> str | None:
    try:
        read_port_range(value)
    except ValueError as error:
        return str(error)
    return None


@dataclass(frozen=True)
class ProcessSettings:
    processes: Path | None = setting(
        "folder of running backend processes and their logs; empty = processes in the data folder", default=None
    )
    backend_ports: str = setting(
        "ports on loopback that backends get: FIRST-LAST", default="20000-29999", check=_port_range
    )
    backend_user: str = setting(
        "user that backends run as, by name or number. Empty: a user without rights where the worker is root "
        "(corral-backend, or a free number), else the worker's own",
        default="",
        parse=str.strip,
    )
    backend_env: tuple[str, ...] = setting(
        "further variables of the worker's environment that backends may see", default=()
    )
    backend_grace_s: Seconds = setting(
        "how long a backend has to end by itself before it is killed", default=Seconds(15), check=positive
    )
    backend_kill_wait_s: Seconds = setting(
        "how long a killed backend may take to be gone", default=Seconds(10), check=positive, advanced=True
    )
    backend_free_timeout_s: Seconds = setting(
        "how long a backend may take to release its memory before it is stopped",
        default=Seconds(5),
        check=positive,
        advanced=True,
    )
    backend_poll_s: Seconds = setting(
        "rest between two looks at a backend that starts", default=Seconds(0.2), check=positive, advanced=True
    )
    backend_probe_timeout_s: Seconds = setting(
        "how long a starting backend may take to answer one look", default=Seconds(2), check=positive, advanced=True
    )
    backend_shim_timeout_s: Seconds = setting(
        "how long the small parent of a backend may take to start", default=Seconds(20), check=positive, advanced=True
    )
    backend_port_rest_s: Seconds = setting(
        "how long a port that was used is given to nobody", default=Seconds(15), advanced=True
    )
    backend_port_claim_s: Seconds = setting(
        "how long a port that was used is kept for the model that had it", default=Seconds(300), advanced=True
    )
    backend_log_bytes: int = setting("size at which a backend's log file is turned", default=8 << 20, check=_log_size)
    backend_log_files: int = setting("log files kept of one backend process", default=4, check=at_least_one)
    backend_log_lines: int = setting(
        "lines per process kept in memory for those who ask", default=1000, check=at_least_one, advanced=True
    )
    backend_logs_kept: int = setting(
        "ended processes of one model whose logs stay on the disk", default=3, check=at_least_one, advanced=True
    )

    def supervisor_settings(
        self, data: Path, *, user: str = "", home: Path | None = None, backends: Path | None = None
    ) -> SupervisorSettings:
        """What the supervisor is told; `data` is the worker's data folder, `user` whom backends run as."""
        # Plain numbers: what the supervisor writes to the disk must be of types that can be written.
        return SupervisorSettings(
            folder=self.processes or data / "processes",
            ports=read_port_range(self.backend_ports),
            quarantine_s=float(self.backend_port_rest_s),
            affinity_s=float(self.backend_port_claim_s),
            poll_s=float(self.backend_poll_s),
            probe_timeout_s=float(self.backend_probe_timeout_s),
            shim_timeout_s=float(self.backend_shim_timeout_s),
            free_timeout_s=float(self.backend_free_timeout_s),
            grace_s=float(self.backend_grace_s),
            kill_wait_s=float(self.backend_kill_wait_s),
            log_bytes=self.backend_log_bytes,
            log_files=self.backend_log_files,
            log_lines=self.backend_log_lines,
            keep_ended=self.backend_logs_kept,
            backend_user=user,
            backend_home=home,
            backends=backends,
            backend_env=self.backend_env,
        )
