"""Which versions of Corral an upgrade removes, and which it never does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from corral.worker.upgrade.prune import prune
from corral.worker.upgrade.versions import COMPLETE, VERSIONS, Versions

NAMES = [f"{number:016x}" for number in range(6)]


@pytest.fixture
def versions(tmp_path: Path) -> Versions:
    """Six versions; the last one is in use."""
    found = Versions(tmp_path / "corral")
    for name in NAMES:
        folder = found.root / VERSIONS / name
        (folder / "bin").mkdir(parents=True)
        (folder / "bin" / "python").symlink_to(sys.executable)
        (folder / COMPLETE).touch()
    found.make_current(found.root / VERSIONS / NAMES[-1])
    return found


def left(versions: Versions) -> list[str]:
    return sorted(each.name for each in (versions.root / VERSIONS).iterdir())


def test_the_current_one_the_one_before_and_those_in_use_stay(versions: Versions) -> None:
    """A shim runs by the link in its own version, and by nothing else of it."""
    root = versions.root / VERSIONS
    (root / NAMES[0] / COMPLETE).unlink()  # an installer may be at it
    (root / "notes").mkdir()
    python = root / NAMES[1] / "bin" / "python"
    with subprocess.Popen([python, "-I", "-S", "-c", "input()"], stdin=subprocess.PIPE) as shim:
        assert prune(versions, (root / NAMES[4],)) == [NAMES[2], NAMES[3]]
        assert left(versions) == [NAMES[0], NAMES[1], NAMES[4], NAMES[5], "notes"]
        shim.communicate(b"\n")
    assert prune(versions, ()) == [NAMES[1], NAMES[4]]


def test_a_folder_in_which_a_process_is_stays(versions: Versions) -> None:
    folder = versions.root / VERSIONS / NAMES[0]
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, cwd=folder) as process:
        assert NAMES[0] not in prune(versions, ())
        process.communicate(b"\n")


def test_nothing_is_removed_where_a_process_cannot_be_seen(versions: Versions, monkeypatch: pytest.MonkeyPatch) -> None:
    def deny(_: psutil.Process) -> list[str]:
        raise psutil.AccessDenied

    monkeypatch.setattr(psutil.Process, "cmdline", deny)
    assert prune(versions, ()) == []
    assert left(versions) == NAMES


def test_nothing_is_removed_while_a_process_was_started_by_the_link(versions: Versions) -> None:
    python = versions.root / "current" / "bin" / "python"
    with subprocess.Popen([python, "-I", "-S", "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert prune(versions, ()) == []
        process.communicate(b"\n")


def test_an_interrupted_removal_is_finished(versions: Versions) -> None:
    root = versions.root / VERSIONS
    os.rename(root / NAMES[0], root / f".removed-{NAMES[0]}")
    prune(versions, tuple(root / name for name in NAMES))
    assert left(versions) == NAMES[1:]
