"""The baseline release: the commit that databases, workers and controllers of today have to get along with
(docs/reference/version-skew.md). Its source comes out of the history of this repository.

Use the fixture by importing it: `from tests.compat.baseline import baseline`.
"""

from __future__ import annotations

import io
import subprocess
import sys
import sysconfig
import tarfile
import venv
from dataclasses import dataclass
from pathlib import Path

import pytest

BASELINE = "d41ec5b4673838868d97b047c12eaf76d2468bbe"
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Release:
    corral: tuple[str, ...]  # its command


@pytest.fixture(scope="session")
def baseline(tmp_path_factory: pytest.TempPathFactory) -> Release:
    folder = tmp_path_factory.mktemp("baseline")
    _extract(folder / "tree")
    return make_release(folder)


def make_release(folder: Path) -> Release:
    """Of the source in `folder/tree/src`."""
    python = _make_environment(folder / "venv", folder / "tree" / "src")
    without = ("env", "-u", "PYTHONPATH")  # it may name the present source
    where = subprocess.check_output([*without, python, "-c", "import corral; print(corral.__file__)"], text=True)
    assert where.startswith(str(folder)), where
    return Release((*without, str(python), "-P", "-m", "corral.cli.main"))


def _extract(folder: Path) -> None:
    archive = subprocess.run(["git", "-C", ROOT, "archive", BASELINE, "src", "backends"], capture_output=True)
    if archive.returncode:
        pytest.skip(
            f"no history here with the baseline release {BASELINE[:7]} (git fetch --unshallow): {archive.stderr!r}"
        )
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
        tar.extractall(folder, filter="data")


def _make_environment(folder: Path, source: Path) -> Path:
    """A Python of its own, so that also the processes of backends find the baseline; our libraries serve both."""
    venv.create(folder, symlinks=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = folder / "lib" / version / "site-packages"
    (packages / "baseline.pth").write_text(f"{source}\n{sysconfig.get_path('purelib')}\n")
    return folder / "bin" / "python"
