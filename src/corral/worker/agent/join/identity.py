"""The node's identity: `identity.json` in the data folder, and the lock that keeps a second worker out of the folder.

Enrolment secret and name are on the disk before the first registration is sent. So a worker that is killed at any
moment registers as the same node at the next start: by `node_token` if the reply was stored, else by the enrolment. A
new identity is made only if there is none, or if the controller reports that the node was deleted.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import msgspec

from corral.contract.codec import Undecodable, decode, encode
from corral.kit.files import make_folder, write_atomically
from corral.kit.secrets import ENROLMENT, digest, new_secret
from corral.worker.status import FatalError

IDENTITY_FILE = "identity.json"
LOCK_FILE = "lock"


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """Replaced whole, never edited. Unknown fields of a newer version are ignored."""

    enrolment: str
    name: str
    name_was_chosen: bool = True  # by a person; else it is the host name, and may change until it is ours
    controller: str = ""
    node_id: str = ""
    node_token: str = ""
    ca: str = ""  # PEM of the pinned CA
    signing_key: str = ""  # so that tokens can be checked before the controller is reached again
    ingress_port: int = 0  # that no person chose, and that the next start takes again if it can

    def renewed(self) -> Identity:
        """After a deletion: the same machine, name and cluster, but a new node."""
        return Identity(
            enrolment=new_secret(ENROLMENT),
            name=self.name,
            name_was_chosen=self.name_was_chosen,
            controller=self.controller,
            ca=self.ca,
            signing_key=self.signing_key,
            ingress_port=self.ingress_port,
        )


class IdentityFile:
    """The identity on disk and in memory; what is set is stored before it is used."""

    def __init__(self, folder: Path, identity: Identity, *, found: bool) -> None:
        self._path = folder / IDENTITY_FILE
        self.current = identity
        self.found = found  # it was there when we started, so a controller may know it

    @classmethod
    def open(cls, folder: Path, *, name: str) -> IdentityFile:
        """Read what is there, or make and store a new one. `name` is what the person asked for, or empty."""
        for leftover in folder.glob(f".{IDENTITY_FILE}.*"):  # of a writer that was killed; they hold secrets
            leftover.unlink(missing_ok=True)
        known = _read(folder / IDENTITY_FILE)
        if known is None:
            made = IdentityFile(
                folder,
                Identity(
                    enrolment=new_secret(ENROLMENT),
                    name=name or default_name(socket.gethostname(), os.getpid()),
                    name_was_chosen=bool(name),
                ),
                found=False,
            )
            made.store(made.current)
            return made
        if name and name != known.name:
            known = _renamed(known, name, folder)
        return IdentityFile(folder, known, found=True)

    def choose_controller(self, url: str) -> str:
        """The controller's URL: the given one, else the stored one."""
        if url and url != self.current.controller:
            self.store(msgspec.structs.replace(self.current, controller=url))
        if not self.current.controller:
            raise FatalError(
                f"this worker has not joined a fleet: {self._path.parent} names none. Give its URL and a join token: "
                "`corral join URL --token TOKEN` (the fleet prints the command with `corral token create`)"
            )
        return self.current.controller

    def store(self, identity: Identity) -> None:
        try:
            write_atomically(self._path, encode(identity), mode=0o600)
        except OSError as error:
            raise FatalError(
                f"cannot write {self._path}: {error.strerror}; free disk space or fix its permissions"
            ) from error
        self.current = identity

    def keep_ingress_port(self, port: int) -> None:
        """For the next start. On a full disk the worker works without it."""
        if port != self.current.ingress_port:
            with contextlib.suppress(FatalError):
                self.store(msgspec.structs.replace(self.current, ingress_port=port))


def default_name(host_name: str, pid: int) -> str:
    """The host name; a machine without one is told apart by the number of this process."""
    return host_name.strip().lstrip("-")[:255] or f"node-{pid}"


def another_name(name: str, enrolment: str) -> str:
    """For a second worker on one machine, or machines cloned with one host name: the same on every try."""
    return f"{name[:250]}-{digest(enrolment)[:4]}"


class FolderLock:
    """Held until it is released, or the process ends."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def release(self) -> None:
        """Before the block ends: a successor takes the folder over."""
        self._file.close()


@contextlib.contextmanager
def hold_folder(folder: Path) -> Iterator[FolderLock]:
    """The data folder is ours alone until the block ends, or the process does, however it does."""
    lock = _open_lock(folder)
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            holder = lock.read().strip() or "unknown"
            raise FatalError(
                f"another worker (pid {holder}) uses {folder}: stop it, or give this one its own --data folder"
            ) from None
        _note_holder(lock, folder)
        yield FolderLock(lock)


def holder_of(folder: Path) -> int | None:
    """The process that holds a folder now; None when nobody does."""
    try:
        with open(folder / LOCK_FILE) as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        words = (folder / LOCK_FILE).read_text().split()
        return int(words[0]) if words and words[0].isdecimal() else None
    except OSError:
        pass
    return None


def _note_holder(lock: IO[str], folder: Path) -> None:
    try:
        lock.seek(0)
        lock.truncate()
        lock.write(f"{os.getpid()}\n")
        lock.flush()
    except OSError as error:
        with contextlib.suppress(OSError):
            lock.close()  # it would try to write again
        raise FatalError(
            f"cannot write in the data folder {folder}: {error.strerror}; free disk space or give another --data"
        ) from error


def _open_lock(folder: Path) -> IO[str]:
    try:
        make_folder(folder)
        return open(folder / LOCK_FILE, "a+", opener=_private)  # closed by the caller's `with`
    except OSError as error:
        raise FatalError(
            f"cannot use the data folder {folder}: {error.strerror}; fix its permissions or give another --data"
        ) from error


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def read_identity(folder: Path) -> Identity | None:
    """The identity of the node in a data folder; None where no worker has been. Raises FatalError."""
    return _read(folder / IDENTITY_FILE)


def _read(path: Path) -> Identity | None:
    try:
        return decode(Identity, path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise FatalError(f"cannot read {path}: {error.strerror}; fix its permissions") from error
    except Undecodable as error:
        raise FatalError(
            f"{path} is damaged ({error}): restore it, or remove it, run `corral nodes replace NAME` and join again"
        ) from error


def _renamed(known: Identity, name: str, folder: Path) -> Identity:
    """A name that no controller knows yet can change; the name of a registered node cannot."""
    if not known.node_id and not known.node_token:
        return msgspec.structs.replace(known, name=name, name_was_chosen=True)
    raise FatalError(
        f"{folder} belongs to the node {known.name!r}, not {name!r}: leave --name out, or give another --data folder"
    )
