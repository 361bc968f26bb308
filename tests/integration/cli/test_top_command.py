"""`corral top` in a real terminal, and once for scripts."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tests.integration.cli.conftest import Corral
from tests.support.scripted_fleet import KEY, MOTION_S, ScriptedFleet, event, node, refused
from tests.support.tmux import Terminal, terminal
from tests.support.waiting import wait_for

MODEL = {
    "id": "tiny",
    "backend": "mock",
    "config_revision": "r1",
    "origin": "person",
    "created_at": "2026-11-15T10:00:00Z",
    "updated_at": "2026-11-15T10:00:00Z",
    "row_version": 1,
    "ready": 1,
}
REPLICA = {
    "model_name": "tiny",
    "node_id": "id-attic",
    "node_name": "attic",
    "replica_index": 0,
    "state": "loaded",
    "process_state": "ready",
    "in_flight": 2,
    "last_used": "",
}
FAILING = {
    "node_id": "id-attic",
    "node_name": "attic",
    "status": "error",
    "percentage": 40,
    "error": "the archive is damaged",
    "failures": 2,
}
OPERATION = {
    "id": "vllm",
    "name": "vllm",
    "fullName": "vllm",
    "jobID": "0badcafe-1",
    "progress": 40,
    "taskType": "Installation",
    "message": "",
    "kind": "install",
    "backend": "vllm",
    "scope": "all",
    "state": "failing",
    "nodes": [FAILING],
    "created_at": "2026-11-15T12:00:00Z",
}
REQUEST: dict[str, Any] = {
    **dict.fromkeys(
        ("served_by", "node_id", "process_id", "revision", "digest", "key_id", "ending", "path"),
        "",
    ),
    **dict.fromkeys(("queue_ms", "load_ms"), 0.0),
    **{"id": "r-1", "key": "notebook", "model": "tiny", "status": 200, "node": "attic", "replica": 0},
    **{"first_byte_ms": 120.0, "total_ms": 900.0, "prompt_tokens": 7, "completion_tokens": 60},
    **{"estimated": False, "streamed": True, "tries": 1, "at": "2026-11-15T12:00:00Z"},
}
RUNNING: dict[str, Any] = {
    **dict.fromkeys(("served_by", "node_id", "key_id", "process_id"), ""),
    **{"id": "r-2", "running_ms": 41_000.0, "state": "running", "key": "laptop", "model": "tiny", "node": "attic"},
    **{"replica": 0, "tokens": 73, "path": "/v1/chat/completions"},
}
MEASURED_S = 6.0
LINES = ("the engine starts", "listening on 127.0.0.1")
Top = Callable[..., AbstractContextManager[Terminal]]


@pytest.fixture
def fleet(corral: Corral) -> ScriptedFleet:
    fleet = corral.fleet
    fleet.models, fleet.replicas = [MODEL], [REPLICA]
    fleet.operations = [OPERATION]
    fleet.requests = [{**REQUEST, "at": datetime.now(UTC).isoformat()}]
    fleet.running = [{**RUNNING, "at": datetime.now(UTC).isoformat()}]
    fleet.motion = lambda: b"".join(
        [event("operation", each) for each in fleet.operations] + [event("node", each) for each in fleet.nodes]
    )
    log = "".join(json.dumps({"timestamp": "", "stream": "stdout", "text": line}) + "\n" for line in LINES)
    fleet.answers["GET", "/api/nodes/attic/backend-logs/tiny%230"] = lambda: web.Response(text=log)
    own = json.dumps({"timestamp": "2026-11-15T12:00:00.123Z", "stream": "", "text": "the worker has joined"}) + "\n"
    fleet.answers["GET", "/api/nodes/attic/backend-logs"] = lambda: web.json_response(["tiny"])
    fleet.answers["GET", "/api/nodes/attic/log"] = lambda: web.Response(text=own)
    fleet.answers["GET", "/api/why/models/tiny"] = lambda: web.json_response(
        {"model": "tiny", "decision": "placed", "text": "attic: has the most free memory"}
    )
    return fleet


@pytest.fixture
def top(fleet: ScriptedFleet, tmp_path: Path) -> Top:
    def start(width: int, height: int, **env: str) -> AbstractContextManager[Terminal]:
        told = {"CORRAL_URL": fleet.url, "CORRAL_KEY": KEY, "HOME": str(tmp_path), **env}
        return terminal(tmp_path, width, height, sys.executable, "-P", "-m", "corral.cli.main", "top", env=told)

    return start


@pytest.mark.parametrize(("width", "height"), [(80, 24), (200, 60)])
def test_every_view_fits_the_terminal(fleet: ScriptedFleet, top: Top, width: int, height: int) -> None:
    fleet.cluster["attention"] = ["1 node waits for approval: cellar. Run `corral nodes approve NAME`."]
    with top(width, height) as screen:
        screen.wait_for(
            "2: 1 healthy, 1 pending", "Needs attention", "! 1 node waits", "install vllm", "tokens/s", "live"
        )
        for key, words in {
            "2": ("NAME", "cellar", "needs approval", "d drain"),
            "3": ("MODEL", "tiny", "1 ready", "#0", "attic"),
            "4": ("install", "failing", "the archive is dam"),
            "5": ("laptop", "running", "41.0 s", "~73", "notebook", "900 ms", "200", "w details"),
            "6": ("tiny#0", "attic", "loaded", "worker's own log", "healthy", "l follow"),
        }.items():
            screen.press(key)
            screen.wait_for(*words)
            lines = screen.lines()
            assert len(lines) == height
            assert "q quit" in lines[-1], "the keys stand in the last line"
            assert max(map(len, lines)) <= width
        screen.press("q")
        assert screen.exit_status() == 0


def test_keys_find_explain_and_follow(fleet: ScriptedFleet, top: Top) -> None:
    with top(80, 24) as screen:
        screen.wait_for("live")
        screen.press("3")
        screen.wait_for("#0")
        screen.press("w")
        screen.wait_for("next replica  can be placed: attic: has the most free memory")
        screen.press("Escape")
        screen.wait_for("w why", gone="next replica")
        screen.press("Down", "l")
        screen.wait_for(*LINES, "log tiny#0 on attic", "(the log has ended)")
        screen.press("Escape")
        screen.wait_for("w why", gone="log tiny#0")
        screen.press("2")
        screen.wait_for("cellar")
        screen.press("/", "a", "t", "t")
        screen.wait_for("filter: att_", "attic", gone="cellar")
        screen.press("Enter")
        screen.wait_for("(Esc removes it)", gone="cellar")
        screen.press("Escape")
        screen.wait_for("cellar", "attic")
        screen.press("Down", "l")  # the node's logs: of the replica, and of its worker
        screen.wait_for("filter: attic", "tiny#0", "worker's own log")
        screen.press("Down", "l")
        screen.wait_for("2026-11-15T12:00:00Z the worker has joined", "log of the worker on attic")
        screen.press("Escape")
        screen.wait_for("l follow", gone="log of the worker")
        screen.press("5")
        screen.wait_for("laptop", "running")
        screen.press("w")  # those under way are first
        screen.wait_for("running ms", "41000", "/v1/chat/completions")
        screen.press("Escape")
        screen.wait_for("w details", gone="running ms")
        screen.press("?")
        screen.wait_for("drain a node; again")


def test_changes_are_asked_for_and_carried_out(fleet: ScriptedFleet, top: Top) -> None:
    with top(80, 24) as screen:
        screen.wait_for("live")
        screen.press("2", "Down", "d")  # the pending node is first
        screen.wait_for("Drain attic", "[y/N]")
        screen.press("n")
        screen.wait_for("Nothing was changed.")
        screen.press("d")
        screen.wait_for("[y/N]")
        screen.press("y")
        screen.wait_for("attic drains", "draining")
        screen.press("d")
        screen.wait_for("attic is in service again")
        screen.press("4")
        screen.wait_for("failing")
        screen.press("r")
        screen.wait_for("install vllm (0badcafe): retrying now")
        screen.press("c")
        screen.wait_for("Cancel install vllm")
        screen.press("y")
        screen.wait_for("install vllm (0badcafe): cancel")
    done = [path for method, path, _ in fleet.calls if method == "POST"]
    assert done == [
        "/api/nodes/id-attic/drain",
        "/api/nodes/id-attic/resume",
        "/api/operations/0badcafe-1/retry",
        "/api/operations/0badcafe-1/cancel",
    ]


def test_the_key_of_a_viewer_changes_nothing(fleet: ScriptedFleet, top: Top) -> None:
    fleet.role = "viewer"
    with top(80, 24) as screen:
        screen.wait_for("admin (viewer)")
        screen.press("2", "Down", "d")
        assert "d drain" not in screen.wait_for("only keys of admins change the fleet")
        screen.press("4", "c")
        screen.wait_for("failing", "only keys of admins change the fleet")
    assert [call for call in fleet.calls if call[0] == "POST"] == []


@pytest.mark.parametrize("env", [{"NO_COLOR": "1"}, {"TERM": "vt100"}])
def test_without_colours_everything_is_still_told(top: Top, env: dict[str, str]) -> None:
    with top(80, 24, **env) as screen:
        screen.wait_for("live")
        screen.press("2")
        screen.wait_for("needs approval")
        codes = screen.codes()
    assert re.findall(r"\x1b\[[0-9;]*\b(?:3[0-7]|4[0-7]|9[0-7]|38|48)[0-9;]*m", codes) == []
    assert "\x1b[7m" in codes, "the chosen row is reversed"


def test_the_window_changes_its_size(top: Top) -> None:
    with top(80, 24) as screen:
        screen.wait_for("live")
        screen.press("2")
        screen.wait_for("cellar", gone="DISK FREE")
        screen.resize(200, 60)
        screen.wait_for("DISK FREE", "q quit")
        assert "q quit" in screen.lines()[-1]
        screen.resize(30, 8)
        screen.wait_for("too small")


def test_a_lost_connection_is_told_and_found_again(fleet: ScriptedFleet, top: Top) -> None:
    with top(80, 24) as screen:
        screen.wait_for("live")
        fleet.answers["GET", "/api/events"] = lambda: web.Response(status=503)
        fleet.motion = None  # ends the open stream
        screen.wait_for("every 2 s")
        screen.wait_for("2: 1 healthy, 1 pending")
        fleet.nodes.append(node("loft"))
        screen.wait_for("3: 2 healthy, 1 pending")


def test_a_thousand_nodes_in_motion_cost_less_than_a_tenth_of_a_core(fleet: ScriptedFleet, top: Top) -> None:
    fleet.nodes = [node(f"node-{number:04}", total_vram=2**36, available_vram=2**35) for number in range(1000)]
    sent: list[float] = []

    def ten_heartbeats() -> bytes:  # each node every ten seconds
        moved = [fleet.nodes[(len(sent) * 10 + at) % 1000] for at in range(10)]
        sent.append(time.monotonic())
        return b"".join(event("node", {**each, "available_ram": len(sent) * 4096}) for each in moved)

    fleet.motion = ten_heartbeats
    with top(80, 24) as screen:
        screen.wait_for("1000: 1000 healthy", "live")
        screen.press("2")
        screen.wait_for("node-0015")
        process = screen.process()
        begin, spent = len(sent), sum(process.cpu_times()[:2])
        wait_for(lambda: len(sent) >= begin + MEASURED_S / MOTION_S, "motion")
        used = sum(process.cpu_times()[:2]) - spent
        assert used < 0.1 * (sent[-1] - sent[begin]), f"{used:.2f} s of CPU in {sent[-1] - sent[begin]:.1f} s"


def test_once_for_people_and_for_scripts(corral: Corral, fleet: ScriptedFleet) -> None:
    ran = corral("top", "--once")
    assert ran.code == 0
    assert "2: 1 healthy, 1 pending" in ran.out
    assert re.search(r"^cellar +pending .*needs approval", ran.out, re.MULTILINE)
    assert re.search(r"^0badcafe +install +vllm +every node +failing", ran.out, re.MULTILINE)
    assert corral("top").out.splitlines()[0] == ran.out.splitlines()[0], "without a terminal it is the same"
    told = corral("top", "--json").json()
    assert [each["name"] for each in told["nodes"]] == ["cellar", "attic"]
    assert (told["role"], told["models"][0]["id"], told["replicas"][0]["state"]) == ("admin", "tiny", "loaded")
    assert (told["operations"][0]["job_id"], told["requests"][0]["key"]) == ("0badcafe-1", "notebook")
    assert [(each["key"], each["state"]) for each in told["running"]] == [("laptop", "running")]


def test_a_controller_that_lists_no_requests_under_way_is_shown_without_them(
    corral: Corral, fleet: ScriptedFleet
) -> None:
    fleet.answers["GET", "/api/requests/running"] = refused(404, "not found", "not_found")
    told = corral("top", "--json").json()
    assert ([each["key"] for each in told["requests"]], told["running"]) == (["notebook"], [])


def test_a_key_for_programs_is_refused(corral: Corral, fleet: ScriptedFleet) -> None:
    fleet.answers["GET", "/api/nodes"] = refused(403, "keys with the role inference cannot do this", "denied")
    ran = corral("top", "--once")
    assert (ran.code, ran.out) == (1, "")
    assert "cannot do this" in ran.err


def test_other_commands_do_not_import_the_terminal() -> None:
    program = "import sys; from corral.cli.main import main; main(['top', '--help']); print('textual' in sys.modules)"
    ran = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout.endswith("False\n")
