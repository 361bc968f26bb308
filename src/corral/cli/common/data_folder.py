"""The data folder of `corral up`: the paths in it, and the lock that allows one `corral up` per folder.

lock · secrets/ (0700) · controller/ · bus/ · worker/ · logs/
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from corral.contract.local_sockets import LONGEST_NAME, MAX_PATH_BYTES
from corral.kit.errors import Conflict
from corral.kit.process import HOME_DATA, lock_holder, read_lock_pid, resolve_data


class Secrets:
    """The files in a folder of secrets."""

    @property
    def secrets(self) -> Path:
        raise NotImplementedError

    @property
    def admin_key(self) -> Path:
        return self.secrets / "admin.key"

    @property
    def gateway_key(self) -> Path:
        return self.secrets / "gateway.key"

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


@dataclass(frozen=True)
class SecretsFolder(Secrets):
    """A folder of secrets by itself, for a fleet whose roles run on several machines."""

    path: Path

    @property
    def secrets(self) -> Path:
        return self.path


@dataclass(frozen=True)
class DataFolder(Secrets):
    root: Path

    @property
    def lock(self) -> Path:
        return self.root / "lock"

    @property
    def ports(self) -> Path:
        """The ports of the last start, so that the next start uses the same ones."""
        return self.root / "ports.json"

    @property
    def secrets(self) -> Path:
        return self.root / "secrets"

    @property
    def worker_token(self) -> Path:
        """The token with which the worker of this machine joins; it is valid once."""
        return self.secrets / "worker.token"

    @property
    def controller(self) -> Path:
        return self.root / "controller"

    @property
    def blobs(self) -> Path:
        """Model files of the controller, by digest."""
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

    @property
    def restore_mark(self) -> Path:
        """There from the first change of `corral restore` to the last: the folder is not whole."""
        return self.root / "restore.json"


def default_data(env: Mapping[str, str]) -> Path:
    chosen = env.get("CORRAL_DATA")
    return Path(chosen).expanduser().absolute() if chosen else resolve_data(HOME_DATA)


def data_folder(given: str | None) -> DataFolder:
    """The folder of `--data`, else the default one."""
    return DataFolder(Path(given).expanduser().absolute() if given else default_data(os.environ))


def chosen_folder(data: str | None, context: str | None) -> DataFolder:
    """The folder of `--data`, else of the fleet that commands on this machine use, else the default one."""
    if data or (not context and os.environ.get("CORRAL_DATA")):
        return data_folder(data)
    from corral.client.contexts import choose_context

    choice = choose_context(os.environ, context)
    return data_folder(choice.context.fleet.data if choice else None)


def run_folder(data: Path, env: Mapping[str, str], *, uid: int | None = None) -> Path:
    """The folder of the Unix sockets: a short path, private, the same at every start, removed by a reboot."""
    import hashlib  # here: most commands need no sockets

    tag = hashlib.sha256(os.fsencode(data.resolve())).hexdigest()[:10]
    runtime = env.get("XDG_RUNTIME_DIR") or ""
    wanted = Path(runtime) / f"corral-{tag}"
    if runtime and Path(runtime).is_dir() and len(os.fsencode(wanted / LONGEST_NAME)) <= MAX_PATH_BYTES:
        return wanted
    return Path("/tmp") / f"corral-{os.getuid() if uid is None else uid}-{tag}"


@contextlib.contextmanager
def lock_file(path: Path) -> Iterator[None]:
    """Hold an flock on the file; the kernel releases it when the process ends. `Conflict` when another process has it.
    The file is not removed: two processes could then hold locks on different files."""
    with _open_lock(path) as descriptor:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Conflict(
                f"`corral up` already runs with {path.parent} (pid {read_lock_pid(descriptor)}): "
                "stop it first, or start this one with another data folder and other ports (--data, --port)"
            ) from None
        os.truncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield


@contextlib.contextmanager
def block_start(folder: DataFolder) -> Iterator[None]:
    """Keep `corral up` from starting with this folder. `Conflict` while it runs."""
    holder = lock_holder(folder.lock)
    if holder is not None:
        raise Conflict(f"the fleet in {folder.root} is running (pid {holder or 'unknown'}): stop it first")
    if not folder.root.is_dir():
        yield
        return
    with lock_file(folder.lock):
        yield


def refuse_unfinished_restore(folder: DataFolder) -> None:
    if folder.restore_mark.exists():
        raise Conflict(
            f"a restore into {folder.root} was interrupted: run `corral restore FILE --data {folder.root}` again, "
            "or remove the folder"
        )


@contextlib.contextmanager
def _open_lock(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
