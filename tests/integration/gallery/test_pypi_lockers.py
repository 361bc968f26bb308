"""Locking with the real uv and the real pip, from an index in a temporary folder."""

from __future__ import annotations

import functools
import hashlib
import http.server
import os
import shutil
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from corral.gallery.pypi.find_locker import NoLocker, find_locker
from corral.gallery.pypi.lock import NoWheels, WheelLocker, digest_of_lock
from corral.gallery.pypi.pip import PipLocker, own_platform, own_python
from corral.gallery.pypi.uv import UvLocker
from corral.gallery.pypi.wheel_sizes import WheelSizes
from corral.kit.errors import Failed, NotFound, Unreachable
from tests.support.uv import path_with_uv


class PackageIndex:
    """A simple index (PEP 503) in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = ""

    def add(self, project: str, version: str, tag: str, requires: tuple[str, ...] = ()) -> Path:
        name = project.replace("-", "_")
        path = self.folder / project / f"{name}-{version}-{tag}.whl"
        path.parent.mkdir(exist_ok=True)
        info = f"{name}-{version}.dist-info"
        lines = [f"Metadata-Version: 2.1\nName: {project}\nVersion: {version}\n"]
        lines += [f"Requires-Dist: {each}\n" for each in requires]
        with zipfile.ZipFile(path, "w") as wheel:
            wheel.writestr(f"{info}/METADATA", "".join(lines))
            wheel.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: {tag}\n")
            wheel.writestr(f"{info}/RECORD", "")
        self.write_page(project)
        return path

    def write_page(self, project: str) -> None:
        folder = self.folder / project
        links = (
            f'<a href="{path.name}#sha256={hashlib.sha256(path.read_bytes()).hexdigest()}">{path.name}</a>'
            for path in sorted(folder.iterdir())
            if path.name != "index.html"
        )
        (folder / "index.html").write_text(f"<!DOCTYPE html><html><body>{'<br>'.join(links)}</body></html>")


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Not a word."""


@pytest.fixture
def index(tmp_path: Path) -> Iterator[PackageIndex]:
    folder = tmp_path / "index"
    folder.mkdir()
    index = PackageIndex(folder)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(tmp_path)))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    index.url = f"http://127.0.0.1:{server.server_port}/index"
    index.add(
        "app", "1.0", "py3-none-any", ("engine>=2", "helper; sys_platform == 'linux'", "mac; sys_platform == 'darwin'")
    )
    index.add("engine", "2.0", "cp310-abi3-manylinux_2_17_x86_64")
    index.add("engine", "2.0", "cp310-abi3-manylinux_2_17_aarch64")
    index.add("engine", "2.0", "cp310-abi3-macosx_13_0_arm64")
    index.add("engine", "2.1", "cp310-abi3-manylinux_2_17_x86_64")
    index.add("engine", "2.1", "cp312-cp312-manylinux_2_17_x86_64")
    index.add("helper", "0.1", "py3-none-any")
    index.add("mac", "0.1", "py3-none-any")
    (folder / "sdist-only").mkdir()
    (folder / "sdist-only" / "sdist_only-1.0.tar.gz").write_bytes(b"not even an archive")
    index.write_page("sdist-only")
    yield index
    server.shutdown()
    thread.join()
    server.server_close()


def environment(index: PackageIndex, tmp_path: Path) -> dict[str, str]:
    """The index comes from the tools' own configuration, here from their environment."""
    plain = {key: value for key, value in os.environ.items() if not key.startswith(("UV_", "PIP_"))}
    return plain | {
        "PATH": path_with_uv(),
        "UV_DEFAULT_INDEX": index.url,
        "PIP_INDEX_URL": index.url,
        "PIP_NO_CACHE_DIR": "1",
        "PIP_CONFIG_FILE": os.devnull,
        "HOME": str(tmp_path),
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
        "XDG_CONFIG_DIRS": str(tmp_path / "config"),
    }


@pytest.fixture
def uv(index: PackageIndex, tmp_path: Path) -> UvLocker:
    locker = find_locker(environment(index, tmp_path), cache_folder=tmp_path / "cache")
    assert isinstance(locker, UvLocker)
    return locker


@pytest.fixture
def pip(index: PackageIndex, tmp_path: Path) -> WheelLocker:
    """What a controller without uv has: Python's own."""
    locker = find_locker(environment(index, tmp_path) | {"PATH": str(tmp_path)})
    if not isinstance(locker, PipLocker):
        pytest.skip("this Python has neither pip nor ensurepip, or uv is beside it")
    return locker


def names(wheels: tuple[object, ...]) -> list[str]:
    return [wheel.name for wheel in wheels]  # type: ignore[attr-defined]


async def test_a_lock_is_for_the_machine_that_was_asked_for(uv: UvLocker) -> None:
    amd = await uv.lock("app", platform="linux/amd64", python="3.11")
    assert (amd.requirement, amd.version, amd.python) == ("app==1.0", "1.0", "3.11")
    assert names(amd.wheels) == [
        "app-1.0-py3-none-any.whl",
        "engine-2.1-cp310-abi3-manylinux_2_17_x86_64.whl",
        "helper-0.1-py3-none-any.whl",
    ]
    newer = await uv.lock("app", platform="linux/amd64", python="3.12")
    assert "engine-2.1-cp312-cp312-manylinux_2_17_x86_64.whl" in names(newer.wheels)
    arm = await uv.lock("app", platform="linux/arm64", python="3.11")
    assert "engine-2.0-cp310-abi3-manylinux_2_17_aarch64.whl" in names(arm.wheels)
    mac = await uv.lock("app", platform="darwin/arm64", python="3.11")
    assert names(mac.wheels) == [
        "app-1.0-py3-none-any.whl",
        "engine-2.0-cp310-abi3-macosx_13_0_arm64.whl",
        "mac-0.1-py3-none-any.whl",
    ]
    assert len({digest_of_lock(lock.wheels) for lock in (amd, newer, arm, mac)}) == 4


async def test_hashes_are_those_of_the_files(uv: UvLocker, index: PackageIndex) -> None:
    lock = await uv.lock("helper==0.1", platform="linux/amd64", python="3.11")
    (wheel,) = lock.wheels
    path = index.folder / "helper" / wheel.name
    assert wheel.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert wheel.url == f"{index.url}/helper/{wheel.name}"
    async with aiohttp.ClientSession() as session:
        (measured,) = await WheelSizes(session).fill(lock.wheels)
        assert measured.size == path.stat().st_size
        shutil.rmtree(path.parent)
        assert (await WheelSizes(session).fill(lock.wheels))[0].size == 0


async def test_what_cannot_be_had(uv: UvLocker) -> None:
    with pytest.raises(NoWheels, match="darwin/amd64"):
        await uv.lock("app", platform="darwin/amd64", python="3.11")
    with pytest.raises(NoWheels):
        await uv.lock("sdist-only", platform="linux/amd64", python="3.11")
    with pytest.raises(NotFound):
        await uv.lock("nothing-there", platform="linux/amd64", python="3.11")
    with pytest.raises(NotFound):
        await uv.lock("app==9", platform="linux/amd64", python="3.11")


async def test_an_index_that_does_not_answer(index: PackageIndex, tmp_path: Path, uv: UvLocker) -> None:
    env = environment(index, tmp_path) | {"UV_DEFAULT_INDEX": "http://127.0.0.1:1/index", "UV_HTTP_RETRIES": "0"}
    locker = find_locker(env, cache_folder=tmp_path / "other-cache")
    with pytest.raises(Unreachable):
        await locker.lock("app", platform="linux/amd64", python="3.11")


async def test_a_project_around_the_controller_does_not_matter(
    uv: UvLocker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "uv.toml").write_text("index-url = 'http://127.0.0.1:1/index'\n")
    monkeypatch.chdir(tmp_path)
    await uv.lock("helper", platform="linux/amd64", python="3.11")


@pytest.mark.skipif(own_platform() != "linux/amd64", reason="the little index has wheels for linux/amd64 only")
async def test_pip_locks_for_machines_like_ours(pip: WheelLocker) -> None:
    lock = await pip.lock("app", platform=own_platform(), python=own_python())
    assert [wheel.project for wheel in lock.wheels] == ["app", "engine", "helper"]
    assert all(len(wheel.sha256) == 64 for wheel in lock.wheels)
    with pytest.raises(Failed, match="install uv"):
        await pip.lock("app", platform="linux/arm64", python=own_python())
    with pytest.raises(NoWheels):
        await pip.lock("sdist-only", platform=own_platform(), python=own_python())


@pytest.mark.skipif(own_platform() != "linux/amd64", reason="the little index has wheels for linux/amd64 only")
async def test_uv_and_pip_lock_the_same(uv: UvLocker, pip: WheelLocker) -> None:
    by_uv = await uv.lock("app", platform=own_platform(), python=own_python())
    by_pip = await pip.lock("app", platform=own_platform(), python=own_python())
    assert digest_of_lock(by_uv.wheels) == digest_of_lock(by_pip.wheels)


async def test_no_tool_at_all() -> None:
    with pytest.raises(Failed, match="neither uv nor pip"):
        await NoLocker().lock("app", platform="linux/amd64", python="3.11")
