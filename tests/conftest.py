"""Shared by all tests: no test may depend on how busy the machine is, nor leave anything behind."""

from __future__ import annotations

import psutil
import pytest
from hypothesis import settings

settings.register_profile("corral", deadline=None, derandomize=True)
settings.load_profile("corral")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Every process a test started has ended by now; one that has not fails the run, by name."""
    left = [process for process in psutil.Process().children(recursive=True) if _lives(process)]
    for process in left:
        line = " ".join(process.cmdline())[:200]
        print(f"\nleft behind by a test: pid {process.pid}: {line}")
    if left and not hasattr(session.config, "workerinput"):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE and process.cmdline())
    except psutil.NoSuchProcess:
        return False
