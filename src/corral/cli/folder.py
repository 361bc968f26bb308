"""The data folder of `corral up`: what lies where. Only names; nothing is made or read here.

lock · secrets/ (0700) · controller/ · bus/ · worker/ · logs/
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from corral.kit.data_folder import HOME_DATA, resolve_data

_SOCKET_PATH_BYTES = 100  # the kernel allows 108 on Linux and 104 elsewhere, with room for a name


@dataclass(frozen=True)
class DataFolder:
    root: Path

    @property
    def lock(self) -> Path:
        return self.root / "lock"

    @property
    def ports(self) -> Path:
        """Which ports were used last, so that a fleet that had to move finds its place again."""
        return self.root / "ports.json"

    @property
    def secrets(self) -> Path:
        return self.root / "secrets"

    @property
    def admin_key(self) -> Path:
        return self.secrets / "admin.key"

    @property
    def gateway_key(self) -> Path:
        return self.secrets / "gateway.key"

    @property
    def worker_token(self) -> Path:
        """The token with which this machine's own worker joins; useless once it has."""
        return self.secrets / "worker.token"

    @property
    def ca_cert(self) -> Path:
        return self.secrets / "ca.crt"

    @property
    def ca_key(self) -> Path:
        return self.secrets / "ca.key"

    @property
    def server_cert(self) -> Path:
        return self.secrets / "server.crt"

    @property
    def server_key(self) -> Path:
        return self.secrets / "server.key"

    @property
    def bus_keys(self) -> Path:
        return self.secrets / "bus"

    @property
    def controller(self) -> Path:
        return self.root / "controller"

    @property
    def blobs(self) -> Path:
        """Model files by digest, of the controller."""
        return self.controller / "blobs"

    @property
    def database(self) -> Path:
        return self.controller / "corral.db"

    @property
    def bus(self) -> Path:
        return self.root / "bus"

    @property
    def worker(self) -> Path:
        return self.root / "worker"

    @property
    def logs(self) -> Path:
        return self.root / "logs"


def default_data(env: Mapping[str, str]) -> Path:
    chosen = env.get("CORRAL_DATA")
    return Path(chosen).expanduser().absolute() if chosen else resolve_data(HOME_DATA)


def run_folder(data: Path, env: Mapping[str, str], *, uid: int | None = None) -> Path:
    """Where the sockets of this data folder live: short, private, the same at every start, gone after a reboot."""
    tag = hashlib.sha256(os.fsencode(data.resolve())).hexdigest()[:10]
    runtime = env.get("XDG_RUNTIME_DIR") or ""
    wanted = Path(runtime) / f"corral-{tag}"
    longest = os.fsencode(wanted / "controller.sock")
    if runtime and Path(runtime).is_dir() and len(longest) < _SOCKET_PATH_BYTES:
        return wanted
    return Path("/tmp") / f"corral-{os.getuid() if uid is None else uid}-{tag}"
