"""Whom backends run as. They are foreign code, and what the worker's own user can read, they could read.

A worker that is root runs them as somebody without rights: the user `corral-backend` where a person made one, else a
user number of our own choosing that nobody on this machine has. Where that user could not reach the backends' files
(a data folder below /root, say), backends run as the worker does, and `corral doctor` says why, on every machine: the
node tells it with its registration. A backend that needs the worker's own interpreter and cannot reach that one alone
is refused instead (`supervisor/launch.py`): else each could choose to be root.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import sys
from dataclasses import dataclass
from pathlib import Path

from corral.contract.codec import Message, encode
from corral.kit.errors import Invalid
from corral.kit.files import write_atomically
from corral.kit.log import get_log
from corral.kit.process import ROOT_DATA
from corral.worker.agent.stop import CannotGoOn
from corral.worker.settings import WorkerSettings
from corral.worker.supervisor.launch import find_shut, find_user
from corral.worker.supervisor.spec import User

log = get_log(__name__)

NAME = "corral-backend"
NUMBERS = range(64100, 64200)  # of users that no distribution hands out; below those of systemd's own
STATE_FILE = "backend-user.json"  # for `corral doctor`
_HOME = "backend-home"


@dataclass(frozen=True)
class BackendUser:
    name: str = ""  # or a number; empty: the worker's own
    home: Path | None = None  # None: the user's own
    warning: str = ""  # why backends could read the worker's secrets
    fix: str = ""

    @property
    def shown(self) -> str:
        return self.name or _own_name()


class BackendUserState(Message, frozen=True):
    user: str = ""
    warning: str = ""
    fix: str = ""


def settle_backend_user(settings: WorkerSettings) -> BackendUser:
    """Decide, open what has to be opened, and leave word for `corral doctor`. Raises `CannotGoOn` where a person named
    a user that will not do."""
    chosen = _given(settings) if settings.backend_user else _usual(settings)
    if chosen.warning:
        log.warning("backends run as the worker's own user", reason=chosen.warning)
    state = BackendUserState(user=chosen.name, warning=chosen.warning, fix=chosen.fix)
    with contextlib.suppress(OSError):  # a full disk costs a hint
        write_atomically(settings.data / STATE_FILE, encode(state), mode=0o600)
    return chosen


def _given(settings: WorkerSettings) -> BackendUser:
    """Whoever backends run as must be there, and get to their files: a start that fails later would say less."""
    name = settings.backend_user
    try:
        user, _ = find_user(name)
    except Invalid as error:
        raise CannotGoOn(f"--backend-user: {error.message}") from error
    if user is None:
        return BackendUser(name)
    _open(settings.data)
    if (shut := _first_shut(user, settings.backends_dir, settings.models_dir)) is not None:
        raise CannotGoOn(
            f"--backend-user: {name} cannot enter {shut}: open it (chmod o+x {shut}), "
            "or give another --data, --backends or --models"
        )
    return BackendUser(name)


def _usual(settings: WorkerSettings) -> BackendUser:
    if os.geteuid() != 0:
        return BackendUser(
            warning=f"the worker runs as {_own_name()} and so do its backends: they could read its credentials",
            fix="run the worker as root, which gives backends a user of their own, or trust the backends you install",
        )
    name = unprivileged_user()
    user, _ = find_user(name)
    if user is None:
        return BackendUser(warning="no user number is free for backends", fix="name a user with --backend-user")
    if settings.data.is_relative_to(ROOT_DATA):  # made with whatever umask; what is in there is closed by itself
        _open(ROOT_DATA)
    folders = (settings.data.parent, *_outside(settings), *python_places())
    if (shut := _first_shut(user, *folders)) is not None:
        return BackendUser(
            warning=f"backends run as root and could read the worker's credentials: another user cannot enter {shut}",
            fix=f"chmod o+x {shut}, or put --data and Python where others may pass, or name a user with --backend-user",
        )
    _open(settings.data)
    return BackendUser(name, home=_make_home(settings.data / _HOME, user))


def unprivileged_user() -> str:
    """The user a person made for this, else the first number that nobody has."""
    with contextlib.suppress(KeyError):
        return pwd.getpwnam(NAME).pw_name
    return next((str(number) for number in NUMBERS if not _is_known(number)), "")


def python_places() -> tuple[Path, ...]:
    """What environments of wheels are made with: not our own, if that is one of these too."""
    base = Path(getattr(sys, "_base_executable", "") or sys.executable)
    return base.resolve(), Path(os.__file__).parent


def _outside(settings: WorkerSettings) -> list[Path]:
    """Folders of backends and models that a person put elsewhere."""
    return [folder for folder in (settings.backends, settings.models) if folder is not None and folder.exists()]


def _first_shut(user: User, *folders: Path) -> Path | None:
    return next((shut for folder in folders if (shut := find_shut(folder, user)) is not None), None)


def _open(data: Path) -> None:
    """Others may pass through the folder, not look into it; what is secret in there is closed by itself."""
    data.chmod(data.stat().st_mode | 0o011)


def _make_home(folder: Path, user: User) -> Path:
    """Engines keep caches at home."""
    folder.mkdir(mode=0o700, exist_ok=True)
    os.chown(folder, user.uid, user.gid)
    return folder


def _own_name() -> str:
    number = os.geteuid()
    return pwd.getpwuid(number).pw_name if _is_known(number) else str(number)


def _is_known(number: int) -> bool:
    try:
        pwd.getpwuid(number)
    except KeyError:
        return False
    return True
