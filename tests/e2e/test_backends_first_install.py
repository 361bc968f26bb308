"""The first install of a real engine, from the package index, as a person sees it on a terminal."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import termios
from collections.abc import Iterator

import pytest

from tests.support.fleet import PATIENT, Fleet
from tests.support.grown_fleet import grown_fleet
from tests.support.processes import CORRAL

# One machine installs the same engine in `test_models_first_chat.py`.
pytestmark = pytest.mark.long
WORKERS = ("barn", "byre")
LINES, COLUMNS = 40, 140
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with grown_fleet(tmp_path_factory.mktemp("first"), *WORKERS, env=PATIENT) as fleet:
        yield fleet


def on_a_terminal(fleet: Fleet, *words: str) -> tuple[int, str]:
    """Exit code, and all that was drawn."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    env = fleet.env | {"TERM": "xterm-256color", "COLUMNS": str(COLUMNS), "LINES": str(LINES)}
    process = subprocess.Popen([*CORRAL, *words], env=env, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    drawn = b""
    with contextlib.suppress(OSError):  # how a terminal says that nobody writes to it any more
        while piece := os.read(ours, 65536):
            drawn += piece
    os.close(ours)
    return process.wait(60), _ESCAPES.sub("", drawn.decode(errors="replace"))


def test_llama_cpp_arrives_on_three_nodes_with_a_bar_for_each(fleet: Fleet) -> None:
    nodes = sorted(fleet.nodes())
    assert len(nodes) == 3
    code, drawn = on_a_terminal(fleet, "backends", "install", "llama-cpp")
    assert code == 0, drawn[-3000:]
    for node in nodes:  # a line that is quick may be done with the download before it is drawn
        moving = rf"^{node} +━*[━╸] *\d+% +(downloading|verifying|extracting) +[\d.]+ \w+ / [\d.]+ MiB"
        assert re.search(moving, drawn, re.MULTILINE), drawn[-3000:]
    bars = r"\s+".join(rf"{node} +━+ +100% +success +[^\r\n]*" for node in nodes)
    assert re.search(bars, drawn), drawn[-3000:]

    ran = fleet.cli("backends", "list", "--json")
    (backend,) = json.loads(ran.stdout)
    assert backend["backend"] == "llama-cpp", backend
    assert sorted(node["node"] for node in backend["nodes"]) == nodes, backend
