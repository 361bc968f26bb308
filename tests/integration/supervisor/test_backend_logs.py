"""What backends write is kept, rotated, read and followed."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from corral.contract.manifest import Manifest
from corral.worker.supervisor.spec import ProcessSpec
from corral.worker.supervisor.supervisor import Supervisor
from tests.support.supervising import QUICK, get, tiny
from tests.support.waiting import DEADLINE_S, until

Open = Callable[..., Any]


def texts(supervisor: Supervisor, name: str) -> list[str]:
    return [line.text for line in supervisor.logs.read(name)]


def said(supervisor: Supervisor, word: str) -> Callable[[], bool]:
    return lambda: word in texts(supervisor, "m")


async def test_both_streams_are_kept_each_in_order_with_their_time(supervisor: Supervisor, tmp_path: Path) -> None:
    """Between the two no order can be promised: they are two pipes."""
    await supervisor.start(tiny(tmp_path / "b", "lines=2 slow=1"))
    await until(lambda: len(texts(supervisor, "m#0")) == 3)  # it may serve before its shim has read them
    lines = supervisor.logs.read("m#0")
    assert [line.text for line in lines if line.stream == "stderr"] == ["tiny line 1", "tiny line 2"]
    assert [line.text for line in lines if line.stream == "stdout"] == ["still loading"]
    assert all(len(line.timestamp) == 27 and line.timestamp.endswith("Z") for line in lines)
    assert supervisor.logs.names() == ["m"]


async def test_a_model_merges_its_replicas_and_an_unknown_one_wrote_nothing(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    first = await supervisor.start(tiny(tmp_path / "b", replica=0))
    second = await supervisor.start(tiny(tmp_path / "b", replica=1))
    for port, word in ((first.port, "one"), (second.port, "two"), (first.port, "three")):
        await asyncio.to_thread(get, port, f"/say/{word}")
        await until(said(supervisor, word))
    assert texts(supervisor, "m") == ["one", "two", "three"]
    assert texts(supervisor, "m#0") == ["one", "three"]
    assert texts(supervisor, "nobody") == []


async def test_followers_get_the_past_and_then_each_line(supervisor: Supervisor, tmp_path: Path) -> None:
    first = await supervisor.start(tiny(tmp_path / "b", "lines=1"))
    await until(said(supervisor, "tiny line 1"))
    async with supervisor.logs.follow("m") as lines, asyncio.timeout(DEADLINE_S):
        assert [line.text for line in lines.initial] == ["tiny line 1"]
        await asyncio.to_thread(get, first.port, "/say/hello")
        assert (await anext(lines)).text == "hello"
        second = await supervisor.start(tiny(tmp_path / "b", replica=1))
        await asyncio.to_thread(get, second.port, "/say/newcomer")
        assert (await anext(lines)).text == "newcomer", "a replica that starts later is heard too"
    assert not supervisor.logs._followers


async def test_what_a_process_said_before_it_crashed_stays(supervisor: Supervisor, tmp_path: Path) -> None:
    first = await supervisor.start(tiny(tmp_path / "b", "lines=1"))
    await asyncio.to_thread(get, first.port, "/say/last")
    os.kill(first.pid, signal.SIGKILL)
    await until(lambda: supervisor.find_key("m#0") and supervisor.find(first.process_id) is None)
    await until(lambda: len(texts(supervisor, "m#0")) == 3)
    assert texts(supervisor, "m#0") == ["tiny line 1", "last", "tiny line 1"]


def chatty(folder: Path, code: str) -> ProcessSpec:
    """A backend that writes, then serves."""
    spec = tiny(folder)
    text = (folder / "tiny.py").read_text()
    (folder / "tiny.py").write_text(f"import sys, os\n{code}\n{text}")
    return spec


async def test_files_turn_by_size_and_the_oldest_go(opened: Open, folder: Path, tmp_path: Path) -> None:
    supervisor = await opened(log_bytes=10_000, log_files=3, log_lines=50)
    code = "for n in range(2000): print(f'line {n:04d} ' + 'x' * 20, flush=True)"
    running = await supervisor.start(chatty(tmp_path / "b", code))
    await until(lambda: texts(supervisor, "m#0")[-1:] == ["line 1999 " + "x" * 20])
    files = sorted((folder / running.process_id / "log").iterdir())
    assert len(files) == 3
    assert all(file.stat().st_size < 10_100 for file in files)
    assert int(files[-1].name) > 10
    assert texts(supervisor, "m#0") == [f"line {n:04d} " + "x" * 20 for n in range(1950, 2000)]


async def test_odd_output_is_no_trouble(supervisor: Supervisor, tmp_path: Path) -> None:
    code = (
        "out = sys.stdout.buffer\n"
        "out.write(b'bar 10%\\rbar 50%\\rbar 100%\\n\\n')\n"
        "out.write(b'\\xff\\xfe not text\\n')\n"
        "out.write(b'y' * 40000 + b'\\n')\n"
        "out.write(b'no end of line'); out.flush()"
    )
    running = await supervisor.start(chatty(tmp_path / "b", code))
    await supervisor.stop(running.process_id)
    said = texts(supervisor, "m#0")
    assert said[:3] == ["bar 10%", "bar 50%", "bar 100%"]
    assert said[3] == "\ufffd\ufffd not text"
    assert "".join(said[4:7]) == "y" * 40000
    assert said[7] == "no end of line"


async def test_a_backend_that_writes_without_end_is_never_held_up(opened: Open, tmp_path: Path) -> None:
    """200 000 lines while nobody reads: they go to the disk, and the last thousand to memory."""
    supervisor = await opened()
    code = "sys.stdout.write(('z' * 79 + '\\n') * 200_000); print('done', flush=True)"
    await supervisor.start(chatty(tmp_path / "b", code))
    await until(lambda: texts(supervisor, "m#0")[-1:] == ["done"])
    assert len(texts(supervisor, "m#0")) == 1000


async def test_a_slow_follower_loses_lines_and_knows_how_many(supervisor: Supervisor, tmp_path: Path) -> None:
    running = await supervisor.start(tiny(tmp_path / "b"))
    async with supervisor.logs.follow("m", buffer=3) as lines:
        for number in range(5):
            await asyncio.to_thread(get, running.port, f"/say/{number}")
            await until(said(supervisor, str(number)))
        assert lines.dropped == 2
        assert [(await anext(lines)).text for _ in range(3)] == ["0", "1", "2"]


async def test_a_backend_of_a_shell_script_is_heard_too(supervisor: Supervisor, tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "run").write_text("#!/bin/sh\necho from the shell\nexit 4\n")
    manifest = Manifest(protocol="openai", command=("run", "{port}"))
    spec = ProcessSpec(backend="sh", directory=str(tmp_path / "b"), manifest=manifest, restart=QUICK)
    failed = (await asyncio.gather(supervisor.start(spec), return_exceptions=True))[0]
    assert "sh ended with code 4" in str(failed)
    assert "from the shell" in str(failed), "stdout, where stderr is empty"
    assert sys.executable  # the script was found without a slash and without its executable bit
    assert os.access(tmp_path / "b" / "run", os.X_OK)
