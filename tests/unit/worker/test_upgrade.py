"""Versions of Corral beside each other, and how one is built."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from corral.kit.errors import Conflict, Failed, Invalid
from corral.worker.upgrade import build as building
from corral.worker.upgrade import upgrade as upgrading
from corral.worker.upgrade import versions as places
from corral.worker.upgrade.build import build, read_wheel
from corral.worker.upgrade.trial import arguments_of
from corral.worker.upgrade.versions import COMPLETE, Versions, find_versions, reload_command, why_not
from tests.support.uv import path_with_uv

WITH_UV = {**os.environ, "PATH": path_with_uv()}
MAIN = "__version__ = '9.9'\n\n\ndef main():\n    print('corral', __version__)\n"


def tiny_wheel(folder: Path, *, main: str = MAIN, name: str = "corral") -> Path:
    """A wheel of a Corral that depends on nothing."""
    info = f"{name}-9.9.dist-info"
    files = {
        "corral/__init__.py": main,
        "corral/_requirements.txt": "",
        "corral/_pip.txt": "",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 9.9\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": "[console_scripts]\ncorral = corral:main\n",
    }
    path = folder / f"{name}-9.9-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for each, text in files.items():
            archive.writestr(each, text)
        archive.writestr(f"{info}/RECORD", "".join(f"{each},,\n" for each in [*files, f"{info}/RECORD"]))
    return path


@pytest.fixture
def versions(tmp_path: Path) -> Versions:
    (tmp_path / "corral" / "versions").mkdir(parents=True)
    return Versions(tmp_path / "corral")


def installed(versions: Versions, digest: str) -> Path:
    folder = versions.folder(digest)
    folder.mkdir()
    (folder / COMPLETE).touch()
    return folder


def test_the_folder_of_versions_is_found_from_a_version(versions: Versions) -> None:
    folder = installed(versions, "a" * 64)
    assert folder.name == "a" * 16
    assert find_versions(folder) is None, "without a current version it is not the installer's"
    versions.make_current(folder)
    assert find_versions(folder) == versions
    other = installed(versions, "b" * 64)
    versions.make_current(other)
    versions.make_current(other)
    assert versions.current == other
    assert find_versions(folder) == versions
    (folder / COMPLETE).unlink()
    assert find_versions(folder) is None


def test_a_reload_starts_what_is_current(versions: Versions, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = installed(versions, "a" * 64)
    versions.make_current(folder)
    monkeypatch.setattr(sys, "prefix", str(folder))
    monkeypatch.setattr(sys, "argv", ["corral", "worker", "--data", "/d"])
    assert reload_command() == [str(versions.root / "current" / "bin" / "corral"), "worker", "--data", "/d"]
    monkeypatch.setattr(sys, "prefix", "/usr")
    assert reload_command() == [sys.executable, *sys.orig_argv[1:]]


def test_who_cannot_be_upgraded_is_told_why(
    versions: Versions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "_CONTAINER_MARKS", (tmp_path / "mark",))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    folder = installed(versions, "a" * 64)
    versions.make_current(folder)
    assert why_not(folder) == ""
    assert "the way this one was installed" in why_not(tmp_path / "venv")
    (tmp_path / "mark").touch()
    assert "runs in a container" in why_not(tmp_path / "venv")
    (tmp_path / "pyproject.toml").touch()
    assert "runs from a checkout" in why_not(tmp_path / ".venv")
    assert why_not(folder) == "", "a machine that a join line has set up, whatever kind it is"


def test_only_wheels_of_corral_are_read(tmp_path: Path) -> None:
    wheel = read_wheel(tiny_wheel(tmp_path))
    assert (wheel.version, len(wheel.sha256)) == ("9.9", 64)
    with pytest.raises(Invalid, match="wheel of other"):
        read_wheel(tiny_wheel(tmp_path, name="other"))
    with pytest.raises(Invalid, match="No such file"):
        read_wheel(tmp_path / "absent.whl")
    (tmp_path / "text.whl").write_text("no archive")
    with pytest.raises(Invalid, match="is no wheel of Corral"):
        read_wheel(tmp_path / "text.whl")


def test_a_version_is_built_once_and_runs(versions: Versions, tmp_path: Path) -> None:
    wheel = read_wheel(tiny_wheel(tmp_path))
    folder = build(versions, wheel, packages=tmp_path, env=WITH_UV)
    said = subprocess.run([folder / "bin" / "corral"], capture_output=True, text=True, check=True, timeout=30).stdout
    assert said == "corral 9.9\n"
    assert folder == versions.folder(wheel.sha256)
    (folder / "mark").touch()
    assert build(versions, wheel, packages=tmp_path, env=WITH_UV) == folder
    assert (folder / "mark").exists(), "it is not built again"
    (folder / COMPLETE).unlink()
    build(versions, wheel, packages=tmp_path, env=WITH_UV)
    assert not (folder / "mark").exists(), "what an interrupted build has left is removed"


def test_a_version_that_does_not_start_leaves_nothing(versions: Versions, tmp_path: Path) -> None:
    wheel = read_wheel(tiny_wheel(tmp_path, main="raise RuntimeError('broken')\n"))
    with pytest.raises(Failed, match=r"the new version does not start: .*broken"):
        build(versions, wheel, packages=tmp_path, env=WITH_UV)
    assert list((versions.root / "versions").iterdir()) == []


def test_a_full_disk_is_named_and_leaves_nothing(
    versions: Versions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = read_wheel(tiny_wheel(tmp_path))
    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as changed:
        changed.setattr(shutil, "disk_usage", lambda _: usage._replace(free=100 << 20))
        with pytest.raises(Failed, match="has 100 MiB of free space, 400 MiB are needed"):
            build(versions, wheel, packages=tmp_path, env=WITH_UV)

    def run_full(*_: object, **__: object) -> str:
        versions.folder(wheel.sha256).mkdir()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(building, "_run", run_full)
    with pytest.raises(Failed, match="the disk is full"):
        build(versions, wheel, packages=tmp_path, env=WITH_UV)
    assert list((versions.root / "versions").iterdir()) == []


@pytest.mark.parametrize(
    "words",
    [
        ["/v/bin/python", "/v/bin/corral", "worker", "--data", "/d"],
        ["/v/bin/python", "-P", "-m", "corral.cli.main", "worker", "--data", "/d"],
    ],
)
def test_a_worker_is_started_again_with_its_own_arguments(words: list[str]) -> None:
    assert arguments_of(words) == ["worker", "--data", "/d"]


def test_one_upgrade_at_a_time(versions: Versions) -> None:
    with upgrading._alone(versions), pytest.raises(Conflict, match="another upgrade"), upgrading._alone(versions):
        pass
    with upgrading._alone(versions):
        pass
