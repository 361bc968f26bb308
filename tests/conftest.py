"""Shared by all tests: no test may depend on how busy the machine is, nor leave anything behind."""

from __future__ import annotations

import gc
import hashlib
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Generator, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import pytest
import structlog
from hypothesis import HealthCheck, settings

# Whole fleets first: they wait more than they compute, so with several processes the rest fills the gaps.
ORDER = ("e2e", "compat", "simulation", "integration", "unit")
TIMEOUTS_S = {"e2e": 180, "compat": 180, "simulation": 180, "integration": 120, "unit": 60}
LEFT_BEHIND = pytest.StashKey[list[str]]()

# Compiled code is kept even where the environment says otherwise: a fleet is many processes, and without compiled code
# each of them compiles everything it imports again, which is a third of the CPU of a start.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Nothing here is judged by time: a busy machine makes each example slow.
slow = [HealthCheck.too_slow]
settings.register_profile("corral", deadline=None, derandomize=True, suppress_health_check=slow)
settings.load_profile("corral")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shuffle", metavar="SEED", help="run files, and the tests of each file, in a random order")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is collected stays: looking for garbage meanwhile takes a quarter of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    limits = {kind: pytest.mark.timeout(limit_s) for kind, limit_s in TIMEOUTS_S.items()}
    for item in items:
        if item.get_closest_marker("timeout") is None:  # one of the test's own, or of its file's, counts instead
            item.add_marker(limits[_kind(item)])
    if seed := config.getoption("--shuffle"):
        items.sort(key=lambda item: (_drawn(seed, str(item.path)), _drawn(seed, item.nodeid)))
    else:
        items.sort(key=lambda item: ORDER.index(_kind(item)))


def _drawn(seed: str, name: str) -> bytes:
    """The same in every process of a run, which all have to collect the tests in the same order."""
    return hashlib.sha256(f"{seed} {name}".encode()).digest()


def pytest_collection_finish() -> None:
    """Nine thousand tests and all they import stay for good: collections need not walk them, a tenth of our time."""
    gc.collect()
    gc.freeze()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[LEFT_BEHIND] = []
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # started in the background: our children would too
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """For unix sockets, whose paths end at about a hundred bytes: pytest's own folders may have longer ones."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="c") as name:
        yield Path(name)


@pytest.fixture(autouse=True)
def log_of_its_own() -> Iterator[None]:
    """A test that runs a command in this process sets up the log as the command does: it ends with the test."""
    root = logging.getLogger()
    before, handlers, level = structlog.get_config(), root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.configure(**before)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Every process a test started has ended by now; one that has not fails the run, by name."""
    config = session.config
    left = [line for process in psutil.Process().children(recursive=True) if (line := _line(process))]
    if hasattr(config, "workerinput"):
        config.workeroutput["left_behind"] = left  # type: ignore[attr-defined]
        return
    if not config.pluginmanager.has_plugin("dsession"):  # else these are pytest's own, and they have told us theirs
        config.stash[LEFT_BEHIND].extend(left)
    if config.stash[LEFT_BEHIND]:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    told = getattr(node, "workeroutput", None) or {}
    node.config.stash[LEFT_BEHIND].extend(told.get("left_behind", []))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    for line in config.stash[LEFT_BEHIND]:
        terminalreporter.write_line(f"left behind by a test: {line}", red=True)


def _kind(item: pytest.Item) -> str:
    return _folder_in_tests(item.path, item.config.rootpath)


@cache  # by file: there are twenty tests for each
def _folder_in_tests(path: Path, root: Path) -> str:
    return path.relative_to(root / "tests").parts[0]


def _line(process: psutil.Process) -> str:
    """Empty for one that has ended."""
    try:
        line = " ".join(process.cmdline())
        return f"pid {process.pid}: {line[:200]}" if line and process.status() != psutil.STATUS_ZOMBIE else ""
    except psutil.NoSuchProcess:
        return ""
