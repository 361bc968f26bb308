"""The specification of a process, also stored on the disk for the worker that adopts it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from corral.contract.codec import Message, Undecodable, always, decode, encode
from corral.contract.manifest import LOCALAI, Manifest
from corral.contract.messages.replicas import ReplicaDevice
from corral.kit.files import write_atomically
from corral.worker.supervisor.keys import process_key
from corral.worker.supervisor.states import RestartPolicy
from corral.worker.system.users import User

GIB = 1024**3
LOOPBACK = "127.0.0.1"


class ProcessSpec(Message, frozen=True, kw_only=True):
    """One process to start. `directory` is the installed version's folder: it must not change while this runs."""

    backend: str = always(str)
    directory: str = always(str)
    manifest: Manifest = LOCALAI
    model: str = ""  # empty: a process of the backend itself, as LocalAI's admin installs have it
    replica: int = 0
    revision: str = ""
    digest: str = ""
    process_id: str = ""  # empty: a fresh one; a restart always gets a fresh one
    model_file: str = ""
    model_dir: str = ""
    context_size: int = 0
    slots: int = 0  # 0: as the manifest says
    words: dict[str, str] = msgspec.field(default_factory=dict)  # further placeholders, from the model's definition
    devices: tuple[ReplicaDevice, ...] = ()
    memory_bytes: int = 0  # reserved by placement; only reported
    env: dict[str, str] = msgspec.field(default_factory=dict)
    # `grpc` only: ModelOptions as JSON (names verbatim). LoadModel is then part of becoming ready, at a restart too.
    load: str = ""
    load_timeout_s: float = 300.0
    # The model's own, whole: requests to a `grpc` process take their defaults from it.
    definition: dict[str, Any] = msgspec.field(default_factory=dict)
    silence_s: float = 0.0  # without output or progress while starting; 0: as the manifest says
    start_timeout_s: float = 0.0  # in all, LoadModel apart; 0: as long as there is progress
    restart: RestartPolicy = msgspec.field(default_factory=RestartPolicy)
    # For a LocalAI controller, which calls the process itself: every interface, and a token that controller knows.
    listen_host: str = LOOPBACK
    token: str = ""  # empty: a random one

    @property
    def key(self) -> str:
        return process_key(self.model, self.backend, self.replica)

    @property
    def protocol(self) -> str:
        return self.manifest.protocol

    def is_same_as(self, other: ProcessSpec) -> bool:
        """Whether a process of one spec satisfies the other."""

        def identity(spec: ProcessSpec) -> tuple[object, ...]:
            return spec.key, spec.backend, spec.digest, spec.revision, spec.directory, spec.protocol

        return identity(self) == identity(other)


def load_timeout_s(weights_bytes: int) -> float:
    """How long LoadModel may take: 5 min and 20 s for each GiB of weights, at most 6 h
    (docs/reference/wire/routing.md#load-timeouts)."""
    return min(300.0 + 20.0 * weights_bytes / GIB, 6 * 3600.0)


class ShimRun(Message, frozen=True, kw_only=True):
    """What the shim needs. Its names are read by `shim.py`, which imports nothing of ours."""

    process_id: str = always(str)
    command: tuple[str, ...] = always(tuple)
    env: dict[str, str] = msgspec.field(default_factory=lambda: dict[str, str]())
    directory: str = always(str)
    log_bytes: int = always(int)
    log_files: int = always(int)
    grace_s: float = always(float)
    user: User | None = None


class Record(Message, frozen=True, kw_only=True):
    """`spec.json`. Only its owner can read it: it contains the token of the process."""

    run: ShimRun
    process: ProcessSpec
    port: int = always(int)
    token: str = always(str)
    restarts: int = 0
    failures: int = 0
    started_at: str = ""

    @staticmethod
    def read(folder: Path) -> Record | None:
        try:
            return decode(Record, (folder / "spec.json").read_bytes())
        except (OSError, Undecodable):
            return None

    def write(self, folder: Path) -> None:
        write_atomically(folder / "spec.json", encode(self), mode=0o600)
