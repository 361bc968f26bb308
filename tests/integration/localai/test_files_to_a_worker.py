"""The file server of a LocalAI worker, as its client: what is sent arrives whole, and goes on where it stopped."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from corral.controller.localai.file_server import FileServerAddress, FileServers, TransferTimes
from corral.kit.clock import SystemClock
from corral.kit.errors import Failed, NotFound, Unreachable
from tests.compat.localai_files import LocalAIFiles
from tests.support.processes import free_port

TOKEN = "shared"
TIMES = TransferTimes(retry_first_s=0.01, retry_cap_s=0.05, budget_s=60.0)
CONTENT = bytes(range(256)) * 2000
DIGEST = "sha256:" + hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
async def worker(tmp_path: Path) -> AsyncIterator[LocalAIFiles]:
    files = LocalAIFiles(tmp_path / "worker", TOKEN)
    await files.start()
    yield files
    await files.close()


@pytest.fixture
async def servers() -> AsyncIterator[FileServers]:
    async with FileServers(TOKEN, SystemClock(), TIMES) as opened:
        yield opened


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights.bin"
    path.write_bytes(CONTENT)
    return path


def at(worker: LocalAIFiles) -> FileServerAddress:
    return FileServerAddress("w1", f"http://127.0.0.1:{worker.port}")


async def test_sent_once_and_verified_there(worker: LocalAIFiles, servers: FileServers, file: Path) -> None:
    seen: list[int] = []
    key = "models/org/m/set/50% of #1?.bin"  # names that break upstream's own client
    there = await servers.ensure(at(worker), key, file, DIGEST, seen.append)
    assert there == str(worker.models / "org/m/set/50% of #1?.bin")
    assert (worker.models / "org/m/set/50% of #1?.bin").read_bytes() == CONTENT
    assert seen[-1] == len(CONTENT)
    assert seen == sorted(seen)
    assert await servers.ensure(at(worker), key, file, DIGEST, seen.append) == there
    assert len(worker.uploads()) == 1, "what is there is not sent again"
    found = await servers.head(at(worker), key)
    assert found is not None
    assert (found.size, found.sha256) == (len(CONTENT), DIGEST.removeprefix("sha256:"))
    assert await servers.list_(at(worker), "models/org/m") == ("set/50% of #1?.bin", "set/50% of #1?.bin.sha256")
    assert await servers.list_(at(worker), "models/nobody") == ()


async def test_it_goes_on_where_it_broke_off(worker: LocalAIFiles, servers: FileServers, file: Path) -> None:
    worker.cut_after = 200_000
    seen: list[int] = []
    await servers.ensure(at(worker), "models/m/w.bin", file, DIGEST, seen.append)
    assert (worker.models / "m/w.bin").read_bytes() == CONTENT
    assert [status for method, _, status in worker.asked if method == "PUT"] == [500, 200]


async def test_all_of_it_was_there_and_nobody_had_confirmed_it(
    worker: LocalAIFiles, servers: FileServers, file: Path
) -> None:
    """Upstream's client is refused a range from 0 for ever."""
    target = worker.models / "w.bin"
    target.write_bytes(CONTENT)
    target.with_name("w.bin.sha256.target").write_text(DIGEST.removeprefix("sha256:"))
    await servers.ensure(at(worker), "models/w.bin", file, DIGEST, lambda _: None)
    found = await servers.head(at(worker), "models/w.bin")
    assert found is not None
    assert found.sha256 == DIGEST.removeprefix("sha256:")


async def test_another_file_of_that_name_is_replaced(worker: LocalAIFiles, servers: FileServers, file: Path) -> None:
    (worker.models / "w.bin").write_bytes(b"something else")
    await servers.ensure(at(worker), "models/w.bin", file, DIGEST, lambda _: None)
    assert (worker.models / "w.bin").read_bytes() == CONTENT


async def test_an_empty_file(worker: LocalAIFiles, servers: FileServers, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.touch()
    digest = "sha256:" + hashlib.sha256().hexdigest()
    assert await servers.ensure(at(worker), "models/empty", empty, digest, lambda _: None)
    assert (worker.models / "empty").read_bytes() == b""


async def test_what_is_not_what_it_should_be_is_not_sent_for_ever(
    worker: LocalAIFiles, servers: FileServers, file: Path
) -> None:
    with pytest.raises(Failed, match="sha256 mismatch"):
        await servers.ensure(at(worker), "models/w.bin", file, "sha256:" + "0" * 64, lambda _: None)
    assert not (worker.models / "w.bin").exists()


async def test_a_worker_that_is_not_there_or_does_not_know_us(
    worker: LocalAIFiles, servers: FileServers, file: Path, tmp_path: Path
) -> None:
    nowhere = FileServerAddress("w2", f"http://127.0.0.1:{free_port()}")
    async with FileServers(TOKEN, SystemClock(), TransferTimes(retry_first_s=0.01, budget_s=0.1)) as hasty:
        with pytest.raises(Unreachable, match="w2 cannot be reached"):
            await hasty.ensure(nowhere, "models/w.bin", file, DIGEST, lambda _: None)
    async with FileServers("wrong", SystemClock(), TIMES) as stranger:
        with pytest.raises(Failed, match="registration token"):
            await stranger.ensure(at(worker), "models/w.bin", file, DIGEST, lambda _: None)
    with pytest.raises(NotFound):
        await servers.get(at(worker), "models/nobody", tmp_path / "x", 10)
    (worker.models / "large").write_bytes(CONTENT)
    with pytest.raises(Failed, match="larger than 10 bytes"):
        await servers.get(at(worker), "models/large", tmp_path / "x", 10)
