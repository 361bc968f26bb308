"""The user that backends run as. Backends are foreign code, and could read every file that the worker's user can read.

A worker that is root runs them as a user without rights: `corral-backend` if a person created that user, else a free
user id. If that user cannot reach the backends' files (in a data folder below /root, for example), backends run as the
worker's user, and `corral doctor` reports why on every machine: the registration contains the warning. A backend that
needs the worker's own interpreter, and cannot reach only that, is refused (`supervisor/launch.py`): else every backend
could choose to run as root.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import stat
import sys
from dataclasses import dataclass
from pathlib import Path

from corral.contract.codec import Message, always, encode
from corral.kit.errors import Invalid
from corral.kit.files import write_atomically
from corral.kit.log import get_log
from corral.kit.process import ROOT_DATA
from corral.worker.settings.node import NodeSettings
from corral.worker.status import FatalError

log = get_log(__name__)

BACKEND_NAME = "corral-backend"
NUMBERS = range(64100, 64200)  # of users that no distribution hands out; below those of systemd's own
STATE_FILE = "backend-user.json"  # for `corral doctor`
_HOME = "backend-home"
_DEVICES = ("nvidia*", "dri/*", "kfd", "accel/*", "davinci*", "dxg")


class User(Message, frozen=True, kw_only=True):
    """A user and its groups."""

    uid: int = always(int)
    gid: int = always(int)
    groups: tuple[int, ...] = always(tuple)


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


def choose_backend_user(settings: NodeSettings, given: str) -> BackendUser:
    """Choose the user, open the folders it needs, and write the choice down for `corral doctor`. Raises `FatalError`
    when a person chose a user that cannot be used."""
    chosen = _given(settings, given) if given else _usual(settings)
    if chosen.warning:
        log.warning("backends run as the worker's own user", reason=chosen.warning)
    state = BackendUserState(user=chosen.name, warning=chosen.warning, fix=chosen.fix)
    with contextlib.suppress(OSError):  # a full disk costs a hint
        write_atomically(settings.data / STATE_FILE, encode(state), mode=0o600)
    return chosen


def _given(settings: NodeSettings, name: str) -> BackendUser:
    """The user that a person chose must exist and reach the files: an error at a later start would explain less."""
    try:
        user, _ = find_user(name)
    except Invalid as error:
        raise FatalError(f"--backend-user: {error.message}") from error
    if user is None:
        return BackendUser(name)
    _open(settings.data)
    if (closed := _first_closed(user, settings.backends_dir, settings.models_dir)) is not None:
        raise FatalError(
            f"--backend-user: {name} cannot enter {closed}: open it (chmod o+x {closed}), "
            "or give another --data, --backends or --models"
        )
    return BackendUser(name)


def _usual(settings: NodeSettings) -> BackendUser:
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
    if (closed := _first_closed(user, *folders)) is not None:
        return BackendUser(
            warning=f"backends run as root and could read the worker's credentials: another user cannot enter {closed}",
            fix=f"chmod o+x {closed}, or move --data and Python to open folders, or name a user with --backend-user",
        )
    _open(settings.data)
    return BackendUser(name, home=_make_home(settings.data / _HOME, user))


def unprivileged_user() -> str:
    """The user that a person created for backends, else the first free user id."""
    with contextlib.suppress(KeyError):
        return pwd.getpwnam(BACKEND_NAME).pw_name
    return next((str(number) for number in NUMBERS if not _is_known(number)), "")


def python_places() -> tuple[Path, ...]:
    """What environments of wheels are made with: not our own, if that is one of these too."""
    base = Path(getattr(sys, "_base_executable", "") or sys.executable)
    return base.resolve(), Path(os.__file__).parent


def _outside(settings: NodeSettings) -> list[Path]:
    """Folders of backends and models outside the data folder."""
    return [folder for folder in (settings.backends, settings.models) if folder is not None and folder.exists()]


def _first_closed(user: User, *folders: Path) -> Path | None:
    return next((closed for folder in folders if (closed := find_closed_folder(folder, user)) is not None), None)


def _open(data: Path) -> None:
    """Let other users pass through the folder without listing it; secrets in it have permissions of their own."""
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


def find_user(name: str) -> tuple[User | None, dict[str, str]]:
    """The user with this name or id, and its environment variables. Empty: the worker's own user. An id need not belong
    to a user of this machine."""
    if not name:
        return None, {}
    if name.isdecimal():
        return _find_number(int(name))
    try:
        entry = pwd.getpwnam(name)
    except KeyError:
        raise Invalid(f"there is no user {name!r} on this machine to run backends as") from None
    if os.geteuid() not in (0, entry.pw_uid):
        raise Invalid(f"backends can run as {name!r} only when the worker runs as root")
    if entry.pw_uid == os.geteuid():
        return None, {}
    groups = tuple(os.getgrouplist(name, entry.pw_gid))
    home = {"HOME": entry.pw_dir, "USER": name, "LOGNAME": name}
    return User(uid=entry.pw_uid, gid=entry.pw_gid, groups=groups), home


def _find_number(number: int) -> tuple[User | None, dict[str, str]]:
    if os.geteuid() not in (0, number):
        raise Invalid(f"backends can run as user {number} only when the worker runs as root")
    if number == os.geteuid():
        return None, {}
    # Programs ask the environment first; there may be no entry in /etc/passwd that they would find.
    home = {"HOME": "/nonexistent", "USER": BACKEND_NAME, "LOGNAME": BACKEND_NAME}
    return User(uid=number, gid=number, groups=device_groups()), home


def device_groups() -> tuple[int, ...]:
    """The groups that own this machine's accelerators: without them a user that is in none could use no GPU."""
    groups = set()
    for pattern in _DEVICES:
        for device in Path("/dev").glob(pattern):
            about = device.stat()
            if stat.S_ISCHR(about.st_mode) and about.st_mode & 0o060 and about.st_gid:
                groups.add(about.st_gid)
    return tuple(sorted(groups))


def give_folder(folder: Path, user: User) -> None:
    """A LocalAI backend writes into its own folder when it starts (its scripts rewrite their paths): it is the
    user's from its first start on. Links are not followed."""
    if folder.stat().st_uid == user.uid:
        return
    for path, folders, files in os.walk(folder):
        for name in (*folders, *files):
            os.chown(os.path.join(path, name), user.uid, user.gid, follow_symlinks=False)
    os.chown(folder, user.uid, user.gid)  # last: a walk that was cut short is begun anew


def find_closed_folder(folder: Path, user: User) -> Path | None:
    """The first folder of the path that this user cannot pass through, according to the permission bits."""
    for place in (*reversed(folder.resolve().parents), folder.resolve()):
        about = place.stat()
        shift = 6 if about.st_uid == user.uid else 3 if about.st_gid in (user.gid, *user.groups) else 0
        if not about.st_mode >> shift & 0o1:
            return place
    return None
