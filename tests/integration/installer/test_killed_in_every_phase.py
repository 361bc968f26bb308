"""A real process that installs from a real registry is killed with -9 in each phase. The next one finds the old
version, no leftovers, and goes on with the bytes that had come."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from corral.contract.codec import encode
from corral.contract.manifest import Manifest
from corral.contract.sources import Source, Wheel
from corral.worker.installer.requests import InstallRequest
from tests.support.bad_line import Line
from tests.support.blob_server import BlobServer
from tests.support.image_registry import ImageRegistry, layer, line, make_image, push_image, registry, run_file
from tests.support.installing import image, inline, names_in, open_installer, request
from tests.support.processes import alive
from tests.support.waiting import until

__all__ = ["line", "registry"]  # fixtures

ROOT = Path(__file__).parents[3]


@contextmanager
def installing(
    folder: Path, wanted: InstallRequest, *until: str, env: dict[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """`until`: the phase, and the bytes, at which it dies."""
    with tempfile.TemporaryFile() as order:
        order.write(encode(wanted))
        order.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.install_driver", str(folder), *until],
            cwd=ROOT,
            stdin=order,
            env=env,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.fixture
async def folder(tmp_path: Path) -> Path:
    async with open_installer(tmp_path) as (installer, _):
        await installer.install(request("demo", inline("old")))
    return tmp_path


@pytest.mark.parametrize("phase", ["resolving", "downloading", "verifying", "extracting"])
async def test_killed_in_this_phase(folder: Path, registry: ImageRegistry, line: Line, phase: str) -> None:
    many = {f"lib/{number}": os.urandom(50_000) for number in range(60)}
    made = make_image(
        {"linux/amd64": [layer({"run.sh": run_file("new")} | many), layer({"more": os.urandom(200_000)})]}
    )
    push_image(registry.url, "killed/phases", "1", made)
    wanted = request("demo", image(f"{line.host}/killed/phases:1"), digest=made.digest)
    line.bytes_per_s = 8_000_000
    # Written in blocks of a mebibyte, or each half second: of two that came, at least one is on the disk.
    with installing(folder, wanted, phase, "2200000" if phase == "downloading" else "0") as process:
        assert await asyncio.to_thread(process.wait, 60) == -signal.SIGKILL, f"it never came to {phase}"
    line.bytes_per_s = 0
    line.passed = 0
    async with open_installer(folder) as (installer, means):
        build = await installer.find("demo")
        assert build is not None
        assert "old" in (build.directory / "run.sh").read_text()
        assert (await installer.check("demo")).is_whole
        assert len(names_in(folder / "backends" / "demo" / "versions")) == 3
        new = await installer.install(wanted)
        assert "new" in (new.directory / "run.sh").read_text()
        assert (await installer.check("demo")).is_whole
        assert [path for path in means.store.folder.rglob("*") if path.is_file()] == []
    if phase != "resolving":
        assert line.passed < max(map(len, made.blobs.values())) - 400_000  # what had come was not fetched again


async def test_a_tool_that_builds_an_environment_dies_with_the_worker(folder: Path) -> None:
    """It would go on writing into a folder the next start sweeps away."""
    tool = folder / "bin" / "uv"
    tool.parent.mkdir()
    tool.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho $$ > "$HOME/pid"\nwhile :; do sleep 1; done\n')
    tool.chmod(0o755)
    env = dict(os.environ, PATH=f"{tool.parent}:{os.environ['PATH']}", HOME=str(folder))
    async with BlobServer() as server:
        data = b"wheel"
        wheel = Wheel("x-1-py3-none-any.whl", server.put("/x", data), hashlib.sha256(data).hexdigest(), len(data))
        manifest = Manifest(protocol="openai", command=("serve",))
        wanted = request("demo", Source("pypi", "x", wheels=(wheel,)), manifest=manifest, force=True)
        with installing(folder, wanted, env=env) as process:
            await until(lambda: (folder / "pid").exists() and (folder / "pid").read_text().strip())
            pid = int((folder / "pid").read_text())
            assert alive(pid)
            process.kill()
            process.wait()
        await until(lambda: not alive(pid))
    async with open_installer(folder) as (installer, _):
        assert len(names_in(folder / "backends" / "demo" / "versions")) == 3
        assert (await installer.check("demo")).is_whole
