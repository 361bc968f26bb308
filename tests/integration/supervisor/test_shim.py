"""The shim by itself: its log, its end, its size."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from corral.worker.supervisor.shim import Log, boot_id, start_time
from tests.support.processes import alive
from tests.support.supervising import ROOT
from tests.support.waiting import promised, wait_for

SHIM = ROOT / "src" / "corral" / "worker" / "supervisor" / "shim.py"
Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    place = tmp_path / "p1"
    place.mkdir(mode=0o700)
    return place


@pytest.fixture
def start(place: Path) -> Iterator[Start]:
    shims: list[subprocess.Popen[bytes]] = []

    def run(script: str, **changed: Any) -> subprocess.Popen[bytes]:
        spec = {
            "process_id": "p1",
            "command": ["/bin/sh", "-c", script],
            "env": {"PATH": "/usr/bin:/bin"},
            "directory": "/",
            "log_bytes": 100_000,
            "log_files": 3,
            "grace_s": 5.0,
        }
        (place / "spec.json").write_text(json.dumps({"run": spec | changed}))
        heard, ready = os.pipe()
        shim = subprocess.Popen(
            [sys.executable, "-I", "-S", str(SHIM), str(place), str(ready)], pass_fds=[ready], start_new_session=True
        )
        shims.append(shim)
        os.close(ready)
        with open(heard, "rb") as pipe:
            assert pipe.read() == b"", "closed when the socket answers"
        return shim

    yield run
    for shim in shims:
        shim.kill()
        shim.wait()


@contextlib.contextmanager
def connected(place: Path) -> Iterator[Any]:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(10)
        sock.connect(str(place / "socket"))
        with sock.makefile("rwb") as file:
            yield file


def state(place: Path) -> dict[str, Any]:
    return dict(json.loads((place / "state.json").read_text()))


def exited(place: Path) -> dict[str, Any]:
    return dict(json.loads((place / "exit.json").read_text()))


def said(place: Path) -> list[str]:
    lines = "".join(path.read_text() for path in sorted((place / "log").iterdir())).splitlines()
    return [line.split(" ", 2)[2] for line in lines]


def test_it_says_who_runs(start: Start, place: Path) -> None:
    shim = start("exec sleep 3600")
    told = state(place)
    assert told["shim_pid"] == shim.pid
    assert (told["process_id"], told["boot_id"]) == ("p1", boot_id())
    assert (told["start"], told["shim_start"]) == (start_time(told["pid"]), start_time(shim.pid))
    with connected(place) as file:
        assert json.loads(file.readline()) == {"hello": told}


def test_end_of_file_is_the_death_at_once(start: Start, place: Path) -> None:
    start("exec sleep 3600")
    with connected(place) as file:
        file.readline()
        killed_at = time.monotonic()
        os.kill(state(place)["pid"], signal.SIGKILL)
        assert json.loads(file.readline())["exit"]["signal"] == 9
        assert file.readline() == b""
        assert time.monotonic() - killed_at < promised(1)
    assert (exited(place)["code"], exited(place)["signal"], exited(place)["asked"]) == (0, 9, False)


def test_whoever_comes_late_still_hears_of_the_end(start: Start, place: Path) -> None:
    start("exit 3")
    wait_for(lambda: (place / "exit.json").exists(), "exit.json")
    with connected(place) as file:
        file.readline()
        assert json.loads(file.readline())["exit"]["code"] == 3
    wait_for(lambda: not (place / "socket").exists(), "the end of the shim")


def test_two_listeners_hear_the_same(start: Start, place: Path) -> None:
    start("exec sleep 3600")
    with connected(place) as one, connected(place) as two:
        one.readline(), two.readline()
        one.write(b'{"stop":5}\n')
        one.flush()
        assert one.readline() == two.readline()


def test_a_stop_is_carried_out_though_whoever_asked_is_gone(start: Start, place: Path) -> None:
    """A worker that dies in the middle of a stop."""
    shim = start("trap '' TERM; echo deaf; while :; do sleep 0.1; done")
    wait_for(lambda: said(place) == ["deaf"], "the script to begin")
    with connected(place) as file:
        file.readline()
        file.write(b'{"stop":0.3}\n')
        file.flush()
    assert shim.wait(60) == 0
    assert exited(place)["signal"] == 9
    assert exited(place)["asked"] is True


def test_sigterm_to_the_shim_stops_its_backend(start: Start, place: Path) -> None:
    shim = start("trap 'exit 4' TERM; echo listening; while :; do sleep 0.05; done")
    wait_for(lambda: said(place) == ["listening"], "the script to begin")
    with connected(place):
        shim.terminate()
        assert shim.wait(60) == 0
    assert (exited(place)["code"], exited(place)["asked"]) == (4, True)


@pytest.mark.parametrize("nonsense", [b"hello\n", b"[]\n", b'{"stop":"soon"}\n', b'{"stop":null}\n', b"\xff\n", b"7\n"])
def test_nonsense_hurts_nobody_but_its_speaker(start: Start, place: Path, nonsense: bytes) -> None:
    start("exec sleep 3600")
    with connected(place) as file:
        file.readline()
        file.write(nonsense)
        file.flush()
    with connected(place) as file:
        assert b"hello" in file.readline()
    assert alive(state(place)["pid"])


def test_a_listener_that_never_reads_holds_nobody_up(start: Start, place: Path) -> None:
    shim = start("i=0; while [ $i -lt 20000 ]; do echo line $i; i=$((i+1)); done; exit 0", log_bytes=10_000_000)
    with connected(place) as file:
        assert shim.wait(60) == 0
        assert file.readline()
    lines = b"".join(path.read_bytes() for path in sorted((place / "log").iterdir())).splitlines()
    assert len(lines) == 20_000
    assert lines[-1].endswith(b"stdout line 19999")


def test_the_shim_is_small(start: Start, place: Path) -> None:
    shim = start("exec sleep 3600")
    with connected(place) as file:
        file.readline()
        rows = Path(f"/proc/{shim.pid}/smaps_rollup").read_text().splitlines()
        sizes = {row.split(":")[0]: int(row.split()[1]) for row in rows[1:]}
    own_kb = sizes["Private_Dirty"] + sizes["Private_Clean"]
    assert own_kb < 10_000, f"{own_kb} kB of its own, {sizes['Rss']} kB with what it shares"
    assert len(os.listdir(f"/proc/{shim.pid}/task")) == 1


def test_a_full_disk_costs_lines_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    log = Log(100_000, 3)
    log.take("stdout", b"before\n")
    good, log.file = log.file, os.open("/dev/full", os.O_WRONLY)
    log.take("stderr", b"one\ntwo\n")
    assert log.lost == 2
    os.close(log.file)
    log.file = good
    log.take("stdout", b"after\n")
    os.close(log.file)
    texts = [line.split(" ", 2)[2] for line in (tmp_path / "log" / "00000001").read_text().splitlines()]
    assert texts == ["before", "(2 lines are missing here: the disk was full)", "after"]
