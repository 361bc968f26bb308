"""Locked wheels into an environment that runs, with uv and with Python's own tools."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import os
import subprocess
import sys
import zipfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from corral.blobs.contents import Contents
from corral.blobs.errors import WrongDigest
from corral.blobs.progress import Progress
from corral.blobs.sources.context import SourceContext
from corral.blobs.sources.python_environment import WheelTools, find_python, requirements
from corral.contract.sources import Source, Wheel
from corral.kit.errors import Failed, Invalid, NotFound
from tests.support.blob_server import BlobServer
from tests.support.installing import names_in, open_source_context
from tests.support.uv import path_with_uv
from tests.support.waiting import until

WITH_UV = dict(os.environ, PATH=path_with_uv())


def make_wheel(name: str, version: str, text: str, *, needs: str = "", script: str = "") -> bytes:
    """A pure wheel with one module, perhaps a command."""
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n" + (
        f"Requires-Dist: {needs}\n" if needs else ""
    )
    files = {
        f"{name}.py": text,
        f"{info}/METADATA": metadata,
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    if script:
        files[f"{info}/entry_points.txt"] = f"[console_scripts]\n{script} = {name}:main\n"
    record = []
    for path, content in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content.encode()).digest()).rstrip(b"=").decode()
        record.append(f"{path},sha256={digest},{len(content)}")
    files[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,"]) + "\n"
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for path, content in files.items():
            archive.writestr(path, content)
    return out.getvalue()


ENGINE = make_wheel(
    "engine", "1.0", "import helper\ndef main():\n    print(helper.WORD)\n", needs="helper>=2", script="engine-serve"
)
HELPER = make_wheel("helper", "2.1+cpu", "WORD = 'served'\n")


@pytest.fixture
async def server() -> AsyncIterator[BlobServer]:
    async with BlobServer() as server:
        yield server


def locked(server: BlobServer, *, python: str = "") -> Source:
    wheels = []
    for name, data in (("engine-1.0-py3-none-any.whl", ENGINE), ("helper-2.1+cpu-py3-none-any.whl", HELPER)):
        url = server.put(f"/{name}", data)
        wheels.append(Wheel(name, url, hashlib.sha256(data).hexdigest(), len(data)))
    return Source("pypi", "engine==1.0", wheels=tuple(wheels), python=python)


def run(program: Path) -> str:
    return subprocess.run([program], capture_output=True, text=True, check=True).stdout


async def build(means: SourceContext, source: Source, target: Path) -> list[Progress]:
    told: list[Progress] = []
    async with Contents(means).open(source, told.append) as opened:
        await opened.write_to(target, told.append)
    return told


@pytest.mark.parametrize("use_uv", [True, False])
async def test_an_environment_that_runs(tmp_path: Path, server: BlobServer, use_uv: bool) -> None:
    target = tmp_path / "versions" / ("sha256-" + "a" * 64)
    target.mkdir(parents=True)
    async with open_source_context(tmp_path, tools=WheelTools(WITH_UV, use_uv=use_uv, timeout_s=55)) as means:
        source = locked(server)
        told = await build(means, source, target)
    assert names_in(target) == ["venv"]
    assert run(target / "venv" / "bin" / "engine-serve") == "served\n"
    phases = list(dict.fromkeys(progress.phase.value for progress in told))
    assert phases == ["resolving", "downloading", "verifying", "extracting"]
    total = sum(
        zipped.file_size for data in (ENGINE, HELPER) for zipped in zipfile.ZipFile(io.BytesIO(data)).infolist()
    )
    assert (told[-1].current_bytes, told[-1].total_bytes) == (total, total)


async def test_the_digest_is_that_of_the_list(tmp_path: Path, server: BlobServer) -> None:
    async with open_source_context(tmp_path) as means:
        source = locked(server)
        async with Contents(means).open(source) as one:
            assert one.digest == one.content_digest
        turned = Source("pypi", "engine==1.0", wheels=source.wheels[::-1], python=source.python)
        async with Contents(means).open(turned) as same:
            assert same.content_digest == one.content_digest
        told = "sha256:" + "b" * 64  # the controller's own, over what it locked
        async with Contents(means).open(Source("pypi", "x", digest=told, wheels=source.wheels)) as named:
            assert (named.digest, named.content_digest) == (told, one.content_digest)
        assert server.asked == []  # nothing is fetched to know that


async def test_a_wheel_that_is_another_one(tmp_path: Path, server: BlobServer) -> None:
    source = locked(server)
    server.put("/helper-2.1+cpu-py3-none-any.whl", HELPER[:-1] + b"x")
    (tmp_path / "t").mkdir()
    async with open_source_context(tmp_path) as means:
        with pytest.raises(WrongDigest):
            await build(means, source, tmp_path / "t")
    assert names_in(tmp_path / "t") == []


@pytest.mark.parametrize(
    "wheel",
    [
        Wheel("engine-1.0.tar.gz", "http://x/", "a" * 64),
        Wheel("../engine-1.0-py3-none-any.whl", "http://x/", "a" * 64),
        Wheel("engine-1.0-py3-none-any.whl", "http://x/", "a" * 63),
        Wheel("engine-1.0-py3-none-any.whl", "http://x/", ""),
    ],
)
async def test_what_is_no_locked_wheel(tmp_path: Path, wheel: Wheel) -> None:
    async with open_source_context(tmp_path) as means:
        for wheels in ((wheel,), (), (locked_one(), locked_one())):
            with pytest.raises(Invalid):
                async with Contents(means).open(Source("pypi", "engine", wheels=wheels)):
                    pass


def locked_one() -> Wheel:
    return Wheel("engine-1.0-py3-none-any.whl", "http://x/", "a" * 64)


def test_the_list_both_tools_read() -> None:
    wheels = [
        Wheel("My_Pkg-1.0_post1-py3-none-any.whl", "", "b" * 64),
        Wheel("a-2!1.0+cu12-1-cp311-cp311-manylinux_2_17_x86_64.whl", "", "a" * 64),
    ]
    assert requirements(wheels) == (
        f"a==2!1.0+cu12 --hash=sha256:{'a' * 64}\nmy-pkg==1.0-post1 --hash=sha256:{'b' * 64}\n"
    )


async def test_a_python_that_is_not_here(tmp_path: Path, server: BlobServer) -> None:
    assert await find_python("", WheelTools())
    assert await find_python(f"{sys.version_info.major}.{sys.version_info.minor}", WheelTools())
    async with open_source_context(tmp_path) as means:
        with pytest.raises(NotFound, match=r"the wheels are for Python 3\.2"):
            async with Contents(means).open(locked(server, python="3.2")):
                pass
    assert server.asked == []  # known before a byte is fetched


async def test_what_the_tools_say_when_they_fail(tmp_path: Path, server: BlobServer) -> None:
    data = b"not a zip file"
    wheel = Wheel("bad-1.0-py3-none-any.whl", server.put("/bad", data), hashlib.sha256(data).hexdigest())
    (tmp_path / "t").mkdir()
    async with open_source_context(tmp_path, tools=WheelTools(WITH_UV, timeout_s=55)) as means:
        with pytest.raises(Failed, match="installing wheels failed"):
            await build(means, Source("pypi", "bad", wheels=(wheel,)), tmp_path / "t")
    assert ".wheels" not in names_in(tmp_path / "t")


async def test_building_can_be_cancelled(tmp_path: Path, server: BlobServer) -> None:
    slow = tmp_path / "bin" / "uv"
    slow.parent.mkdir()
    slow.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho $$ > "$HOME/pid"\nsleep 600\n')
    slow.chmod(0o755)
    env = dict(os.environ, PATH=f"{slow.parent}:{os.environ['PATH']}", HOME=str(tmp_path))
    (tmp_path / "t").mkdir()
    async with open_source_context(tmp_path, tools=WheelTools(env=env, timeout_s=55)) as means:
        task = asyncio.create_task(build(means, locked(server), tmp_path / "t"))
        await until((tmp_path / "pid").exists)
        await until(lambda: (tmp_path / "pid").read_text().strip())
        pid = int((tmp_path / "pid").read_text())
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: not Path(f"/proc/{pid}").exists())


async def test_settings_of_somebodys_shell_change_nothing(tmp_path: Path, server: BlobServer) -> None:
    env = dict(WITH_UV, UV_INDEX_URL="http://127.0.0.1:1/", PIP_TARGET="/nowhere", PYTHONPATH="/nowhere")
    (tmp_path / "t").mkdir()
    async with open_source_context(tmp_path, tools=WheelTools(env=env, timeout_s=55)) as means:
        await build(means, locked(server), tmp_path / "t")
    assert (tmp_path / "t" / "venv" / "bin" / "engine-serve").exists()


async def test_progress_moves_while_wheels_are_unpacked(tmp_path: Path, server: BlobServer) -> None:
    """A stand-in for uv writes some bytes and stops until it may go on."""
    tools, go = tmp_path / "tools", tmp_path / "go"
    tools.mkdir()
    uv = tools / "uv"
    uv.write_text(
        "#!/bin/sh\n"
        'case "$1" in\n'
        "venv) shift; for last; do :; done; mkdir -p $last/lib/python3/site-packages/pip;"
        " head -c 100000 /dev/zero > $last/lib/python3/site-packages/pip/x;;\n"
        f'pip) printf 12345 > "$(dirname $(dirname $5))/lib/python3/site-packages/half";'
        f" until [ -e {go} ]; do sleep 0.05; done;;\n"
        "esac\n"
    )
    uv.chmod(0o755)
    (target := tmp_path / "t").mkdir()
    told: list[Progress] = []
    means_tools = WheelTools(dict(os.environ, PATH=f"{tools}:{os.environ['PATH']}"), timeout_s=55)
    async with (
        open_source_context(tmp_path, tools=means_tools) as means,
        Contents(means).open(locked(server), told.append) as opened,
    ):
        writing = asyncio.create_task(opened.write_to(target, told.append))
        await until(lambda: any(each.phase.value == "extracting" and each.current_bytes == 5 for each in told))
        assert told[-1].total_bytes > 5
        go.touch()
        await writing
    assert told[-1].current_bytes == told[-1].total_bytes
