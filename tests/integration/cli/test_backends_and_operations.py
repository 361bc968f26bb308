"""`corral backends …` and `corral ops …`: what they print, what they send, how they end."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tests.integration.cli.conftest import Corral, start
from tests.support.scripted_fleet import refused
from tests.support.waiting import wait_for

OP = "3f2a91c0-0000-4000-8000-000000000001"
OTHER = "77e1b200-0000-4000-8000-000000000002"


def on(name: str, status: str = "downloading", **more: Any) -> dict[str, Any]:
    return {"node_id": f"id-{name}", "node_name": name, "status": status, "percentage": 0, **more}


def operation(state: str = "under_way", *nodes: dict[str, Any], job: str = OP, **more: Any) -> dict[str, Any]:
    return {
        "id": "vllm",
        "jobID": job,
        "kind": "install",
        "backend": "vllm",
        "scope": "all",
        "state": state,
        "settled": state != "under_way",
        "message": "as it is",
        "nodes": list(nodes),
        **more,
    }


DONE = operation("done", on("attic", "success", version="1.1", percentage=100.0))
FAILING = operation("failing", on("attic", "error", error="disk full", next_retry_at="2199-01-01T00:00:00Z"))
WAITING = operation(
    "waiting",
    on("attic", "success"),
    on("shed", "queued", error="node offline, will retry when healthy", waits=True),
)


def asked(corral: Corral) -> list[dict[str, Any]]:
    return [body for method, path, body in corral.fleet.calls if (method, path) == ("POST", "/api/operations")]


def test_install_stays_until_it_is_done_and_says_so_in_lines(corral: Corral) -> None:
    begun = operation("under_way", on("attic", phase="downloading", percentage=40.0, file_name="layer"))
    corral.fleet.accepts = [begun]
    corral.fleet.told = [[begun, DONE]]
    ran = corral("backends", "install", "vllm")
    assert ran.code == 0
    assert ran.out.splitlines() == [
        f"install vllm on every node ({OP})",
        "attic: downloading 40% (layer)",
        "attic: success 1.1",
        "vllm: installed on attic",
    ]
    assert ran.err == ""
    assert asked(corral) == [{"backend": "vllm"}]  # kind and scope are the usual ones: install, every node


@pytest.mark.parametrize(
    ("ended", "code", "words", "hint"),
    [
        (FAILING, 1, "vllm: failing on attic: disk full; next attempt in", "corral ops retry 3f2a91c0"),
        (WAITING, 3, "vllm: waiting on shed: node offline, will retry when healthy", "corral ops watch 3f2a91c0"),
        (operation("done", on("attic", "cancelled"), outcome="cancelled"), 1, "vllm: cancelled on attic", ""),
        (operation("done", on("attic", "skipped", error="no linux/arm64 build")), 0, "no linux/arm64 build", ""),
        (operation("done"), 3, "no node matches yet; the first node that joins gets it", ""),
    ],
)
def test_how_it_ends_is_told_by_the_exit_code_and_what_remains(
    corral: Corral, ended: dict[str, Any], code: int, words: str, hint: str
) -> None:
    corral.fleet.accepts = [ended]
    ran = corral("backends", "install", "vllm")
    assert ran.code == code
    assert words in ran.out
    assert hint in ran.err
    assert bool(ran.err) == bool(hint)


def test_install_passes_on_everything_it_was_told(corral: Corral) -> None:
    corral.fleet.accepts = [DONE] * 4
    corral("backends", "install", "vllm", "--node", "attic", "--force", "--max-parallel", "2")
    corral("backends", "install", "--uri", "file:///srv/x.tar.gz", "--name", "mine", "--alias", "my", "-l", "tier=fast")
    corral("backends", "install", "vllm", "--all-nodes")
    assert asked(corral) == [
        {"backend": "vllm", "node": "attic", "force": True, "max_parallel": "2"},
        {"uri": "file:///srv/x.tar.gz", "name": "mine", "alias": "my", "selector": "tier=fast"},
        {"backend": "vllm"},
    ]


@pytest.mark.parametrize(
    "words",
    [
        ["install"],
        ["install", "vllm", "--uri", "file:///x"],
        ["install", "vllm", "--name", "mine"],
        ["install", "vllm", "--node", "attic", "--all-nodes"],
        ["install", "vllm", "--node", "attic", "--selector", "a=b"],
        ["install", "vllm", "--node", ""],
        ["install", "vllm", "--selector", " "],
        ["upgrade", "vllm", "--node", ""],
        ["delete", "vllm", "--yes", "--all-nodes", "--node", ""],
        ["upgrade"],
        ["upgrade", "vllm", "--outdated"],
        ["rollback"],
        ["delete", "vllm", "--yes"],
    ],
)
def test_what_cannot_be_meant_is_refused_before_anything_is_sent(corral: Corral, words: list[str]) -> None:
    ran = corral("backends", *words)
    assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1)
    assert corral.fleet.calls == []


def test_an_unknown_backend_is_answered_with_near_names(corral: Corral) -> None:
    words = "no backend is called 'vlm'; did you mean vllm?"
    corral.fleet.answers[("POST", "/api/operations")] = refused(404, words, "not_found")
    ran = corral("backends", "install", "vlm")
    assert (ran.code, ran.out, ran.err) == (1, "", f"corral: {words}\n")
    corral.fleet.available = [{"name": "vllm", "id": "ours@vllm"}]
    assert corral("backends", "show", "vlm").err == "corral: no backend 'vlm': did you mean vllm?\n"


def test_several_are_asked_for_one_by_one_and_watched_together(corral: Corral) -> None:
    corral.fleet.accepts = [DONE, operation("done", on("attic", "success"), job=OTHER, backend="mock")]
    ran = corral("backends", "install", "vllm", "mock")
    assert ran.code == 0
    assert "vllm attic: success 1.1" in ran.out
    assert ran.out.splitlines()[-2:] == ["vllm: installed on attic", "mock: installed on attic"]


def test_one_that_is_refused_does_not_stop_the_rest_but_is_a_failure(corral: Corral) -> None:
    corral.fleet.accepts = [DONE]
    corral.fleet.answers[("POST", "/api/operations")] = refused(404, "no backend is called 'x'", "not_found")
    ran = corral("backends", "install", "x", "vllm")
    assert ran.code == 1
    assert ran.err == "corral: no backend is called 'x'\n"
    assert "vllm: installed on attic" in ran.out


def test_detach_prints_the_id_and_leaves(corral: Corral) -> None:
    corral.fleet.accepts = [operation(), operation()]
    ran = corral("backends", "install", "vllm", "--detach")
    assert (ran.code, ran.out) == (0, f"{OP}\n")
    assert "corral ops watch 3f2a91c0" in ran.err
    ran = corral("backends", "install", "vllm", "--detach", "--json")
    assert [each["job_id"] for each in ran.json()] == [OP]


def test_json_is_the_end_and_nothing_else(corral: Corral) -> None:
    corral.fleet.accepts = [WAITING]
    ran = corral("backends", "install", "vllm", "--json")
    assert ran.code == 3
    assert [(each["state"], each["nodes"][1]["waits"]) for each in ran.json()] == [("waiting", True)]
    assert ran.err == ""


def test_dry_run_tells_what_would_happen_and_asks_for_nothing(corral: Corral) -> None:
    corral.fleet.plan = {
        "kind": "upgrade",
        "backend": "vllm",
        "notes": ["one node per variant switches first"],
        "nodes": [
            {
                "node_id": "a",
                "node_name": "attic",
                "action": "upgrade",
                "variant": "cpu-vllm",
                "installed_version": "1.0",
                "version": "1.1",
                "fetch_bytes": 1048576,
                "disk_after_bytes": 2097152,
                "processes": "2 are replaced one by one",
            },
            {"node_id": "s", "node_name": "shed", "action": "skip", "reason": "no linux/arm64 build"},
        ],
    }
    ran = corral("backends", "upgrade", "vllm", "--dry-run")
    assert ran.code == 0
    lines = [line.split("  ") for line in ran.out.splitlines()]
    assert [word.strip() for word in lines[1] if word.strip()] == [
        *("attic", "upgrade", "cpu-vllm", "1.0 → 1.1", "1.0 MiB", "2.0 MiB free", "2 are replaced one by one")
    ]
    assert "no linux/arm64 build" in ran.out
    assert "switches first" in ran.err
    assert "Nothing was changed" in ran.err
    assert corral("backends", "upgrade", "vllm", "--dry-run", "--json").json()[0]["nodes"][1]["action"] == "skip"
    assert corral.fleet.operations == []


def test_upgrade_outdated_asks_for_what_has_something_newer(corral: Corral) -> None:
    ran = corral("backends", "upgrade", "--outdated")
    assert (ran.code, ran.out, ran.err) == (0, "", "Every backend is up to date.\n")
    assert corral("backends", "upgrade", "--outdated", "--json").json() == []
    newer = {"backend_name": "vllm", "installed_version": "1.0", "available_version": "1.1"}
    corral.fleet.upgrades = {"vllm": newer}
    corral.fleet.accepts = [operation("done", on("attic", "success"), kind="upgrade")]
    ran = corral("backends", "upgrade", "--outdated", "--max-parallel", "50%")
    assert ran.out.splitlines()[-1] == "vllm: upgraded on attic"
    assert asked(corral) == [{"kind": "upgrade", "backend": "vllm", "max_parallel": "50%"}]


UP_TO_DATE = "vllm: nothing newer on any node (1.1 is installed)"
UNCHANGED = operation("done", on("attic", "skipped", error="it has this build already", version="1.1"), kind="upgrade")


def test_an_upgrade_that_finds_nothing_newer_says_so_and_watches_nothing(corral: Corral) -> None:
    corral.fleet.accepted = {"message": UP_TO_DATE, "unchanged": True}
    corral.fleet.accepts = [UNCHANGED] * 4
    ran = corral("backends", "upgrade", "vllm")
    assert (ran.code, ran.out, ran.err) == (0, f"{UP_TO_DATE}\n", "")
    ran = corral("backends", "upgrade", "vllm", "--detach")
    assert (ran.code, ran.out, ran.err) == (0, f"{UP_TO_DATE}\n", "")
    ran = corral("backends", "upgrade", "vllm", "--json")
    assert (ran.code, [each["nodes"][0]["status"] for each in ran.json()], ran.err) == (0, ["skipped"], "")
    corral.fleet.upgrades = {"vllm": {}}  # found newer some hours ago
    assert corral("backends", "upgrade", "--outdated").out == f"{UP_TO_DATE}\n"


def test_nothing_newer_names_the_galleries_that_cannot_be_read(corral: Corral) -> None:
    notice = "The gallery farm cannot be read (timeout)."
    corral.fleet.galleries = [{"kind": "backends", "name": "farm", "url": "u", "notice": notice}]
    corral.fleet.accepted = {"message": UP_TO_DATE, "unchanged": True}
    corral.fleet.accepts = [UNCHANGED]
    ran = corral("backends", "upgrade", "vllm")
    next_step = "What to check: `corral doctor`.\n"
    assert (ran.out, ran.err) == (f"{UP_TO_DATE} (in the galleries that can be read)\n", f"{notice}\n{next_step}")
    ran = corral("backends", "upgrade", "--outdated")
    assert (ran.code, ran.err) == (
        0,
        f"{notice}\n{next_step}Every backend is up to date with the galleries that can be read.\n",
    )
    same = {"node_id": "a", "node_name": "attic", "action": "nothing", "version": "1.1"}
    corral.fleet.plan = {"kind": "upgrade", "backend": "vllm", "notes": [UP_TO_DATE], "nodes": [same]}
    ran = corral("backends", "upgrade", "vllm", "--dry-run")
    assert (ran.code, ran.err.splitlines()[0]) == (0, UP_TO_DATE)
    assert notice in ran.err


def test_upgrade_outdated_says_so_when_what_is_outdated_is_not_on_these_nodes(corral: Corral) -> None:
    corral.fleet.upgrades = {"vllm": {}}
    for flags, out in (((), ""), (("--json",), "[]\n")):
        gone = refused(404, "backend 'vllm' is not installed on any of these nodes", "not_found")
        corral.fleet.answers[("POST", "/api/operations")] = gone
        ran = corral("backends", "upgrade", "--outdated", "--selector", "tier=test", *flags)
        assert (ran.code, ran.out, ran.err) == (0, out, "Every backend is up to date.\n")


def test_upgrade_outdated_of_one_node_takes_only_what_is_outdated_there(corral: Corral) -> None:
    corral.fleet.matrix = {
        "nodes": [{"id": "id-attic", "name": "attic", "status": "healthy"}],
        "backends": [
            {"backend": "mock", "nodes": {"id-attic": {"installed": True}}},
            {"backend": "vllm", "nodes": {"id-attic": {"installed": True, "outdated": True}}},
        ],
    }
    corral.fleet.accepts = [DONE]
    corral("backends", "upgrade", "--outdated", "--node", "attic")
    assert asked(corral) == [{"kind": "upgrade", "backend": "vllm", "node": "attic"}]


def test_rollback_and_delete(corral: Corral) -> None:
    corral.fleet.accepts = [
        operation("done", on("attic", "success"), kind="rollback"),
        operation("done", on("attic", "success"), kind="delete", job=OTHER),
    ]
    assert corral("backends", "rollback", "vllm", "--node", "attic").out.endswith("vllm: rolled back on attic\n")
    ran = corral("backends", "delete", "vllm", "--all-nodes")
    assert (ran.code, "--yes" in ran.err) == (2, True)
    assert corral("backends", "delete", "vllm", "--all-nodes", "--yes").out.endswith("vllm: deleted on attic\n")
    assert asked(corral) == [
        {"kind": "rollback", "backend": "vllm", "node": "attic"},
        {"kind": "delete", "backend": "vllm"},
    ]


def test_list_and_show_what_is_installed_where(corral: Corral) -> None:
    cell = {"installed": True, "version": "1.0", "variant": "cpu-vllm", "outdated": True}
    corral.fleet.matrix = {
        "nodes": [
            {"id": "id-attic", "name": "attic", "status": "healthy"},
            {"id": "id-cellar", "name": "cellar", "status": "pending"},
        ],
        "backends": [
            {"backend": "vllm", "nodes": {"id-attic": cell}, "upgrade_available": True, "available_version": "1.1"}
        ],
    }
    assert corral("backends", "list").out.splitlines()[1].split() == ["vllm", "1.0", "1", "of", "2:", "attic", "1.1"]
    assert corral("backends", "list", "--node", "attic").out.splitlines()[1].split()[:3] == ["vllm", "1.0", "cpu-vllm"]
    assert corral("backends", "list", "--node", "cellar").err == "No backend is installed on cellar.\n"
    assert corral("backends", "list", "--json").json()[0]["nodes"][0]["node"] == "attic"
    assert corral("backends", "list", "--node", "cellar", "--json").json() == []
    corral.fleet.available = [{"name": "vllm", "id": "ours@vllm", "gallery": {"name": "ours"}, "license": "mit"}]
    shown = corral("backends", "show", "vllm").out
    assert "gallery  ours" in shown
    assert "a newer version is available" in shown
    assert corral("backends", "show", "vllm", "--json").json()["available"]["license"] == "mit"


def test_show_does_without_the_galleries_for_what_is_installed(corral: Corral) -> None:
    corral.fleet.matrix = {
        "nodes": [{"id": "id-attic", "name": "attic", "status": "healthy"}],
        "backends": [{"backend": "vllm", "nodes": {"id-attic": {"installed": True, "version": "1.0"}}}],
    }
    corral.fleet.answers[("GET", "/api/backends/available")] = refused(503, "no gallery answers", "unavailable")
    ran = corral("backends", "show", "vllm")
    assert ran.code == 0
    assert "no gallery answers" in ran.err
    assert "1.0" in ran.out


def test_available_and_upgrades(corral: Corral) -> None:
    corral.fleet.available = [
        {"name": "vllm", "is_meta": True, "capabilities": {"default": "cpu-vllm"}, "description": "Fast"},
        {"name": "cpu-vllm"},
    ]
    assert corral("backends", "available").out.splitlines()[1:] == ["vllm  Fast"]
    assert [each["name"] for each in corral("backends", "available", "--builds", "--json").json()] == [
        "vllm",
        "cpu-vllm",
    ]
    assert corral("backends", "available", "nothing").err == "No gallery has an entry that matches.\n"
    corral.fleet.upgrades = {"vllm": {"installed_version": "1.0", "available_version": "1.1"}}
    assert corral("backends", "upgrades").out.splitlines()[1].split() == ["vllm", "1.0", "1.1"]
    assert corral("backends", "upgrades", "--check", "--json").json()["vllm"]["available_version"] == "1.1"
    assert ("POST", "/api/backends/upgrades/check", None) in corral.fleet.calls


def test_operations_are_listed_shown_and_found_by_how_their_id_begins(corral: Corral) -> None:
    assert corral("ops", "list").err == "No operation is running.\n"
    corral.fleet.operations = [WAITING, operation(job=OTHER)]
    assert corral("ops", "list").out.splitlines()[1].split()[:3] == ["3f2a91c0", "install", "vllm"]
    assert len(corral("ops", "list", "--all", "--json").json()) == 2
    shown = corral("ops", "show", "3f2a").out
    assert OP in shown
    assert "node offline, will retry when healthy" in shown
    assert corral("ops", "show", OP, "--json").json()["job_id"] == OP
    ran = corral("ops", "show", "9999")
    assert (ran.code, ran.err) == (1, "corral: no operation '9999': `corral ops list --all` lists them\n")
    corral.fleet.operations = [operation(job="3f2a-1"), operation(job="3f2a-2")]
    assert "2 operation ids begin with '3f2a'" in corral("ops", "show", "3f2a").err


@pytest.mark.parametrize("given", ["", " ", "/", "..", "?all=true", "x/events", "%2f"])
def test_what_cannot_be_an_id_is_not_made_a_path(corral: Corral, given: str) -> None:
    ran = corral("ops", "cancel", given)
    assert (ran.code, ran.out) == (1, "")
    assert ran.err == f"corral: {given!r} is not an operation id: `corral ops list --all` lists them\n"
    assert corral.fleet.calls == []


def test_a_path_from_here_is_made_one_from_anywhere(corral: Corral) -> None:
    corral.fleet.accepts = [DONE]
    corral("backends", "install", "--uri", "./x.tar.gz", "--name", "mine")
    assert asked(corral) == [{"uri": str(Path.cwd() / "x.tar.gz"), "name": "mine"}]


def test_operations_are_steered(corral: Corral) -> None:
    corral.fleet.operations = [FAILING]
    assert corral("ops", "cancel", "3f2a", "--node", "attic").out == "3f2a91c0 (install vllm) cancelled on attic\n"
    assert corral("ops", "withdraw", OP).out == "3f2a91c0 (install vllm) withdrawn\n"
    assert corral("ops", "dismiss", OP).out == "3f2a91c0 (install vllm) dismissed\n"
    assert corral("ops", "retry", OP).code == 1
    corral.fleet.accepts = [operation("done", on("attic", "success"), job=OTHER)]
    assert corral("ops", "retry", OP, "--detach").out == f"{OTHER}\n"
    ran = corral("ops", "cancel", "9999", OP)
    assert ran.code == 1
    assert ran.out == "3f2a91c0 (install vllm) cancelled\n"
    assert [path.rpartition("/")[2] for method, path, _ in corral.fleet.calls if method == "POST"] == [
        *("cancel", "withdraw", "dismiss", "retry", "retry", "cancel")
    ]


def test_what_holds_again_after_a_cancel_is_told(corral: Corral) -> None:
    corral.fleet.operations = [WAITING]
    note = "vllm will be deleted again on attic, as asked earlier in operation 77e1b200"
    answer = {"success": True, "message": f"operation cancelled; {note}", "jobID": OP, "notes": [note]}
    corral.fleet.answers[("POST", f"/api/operations/{OP}/cancel")] = web.json_response(answer)
    ran = corral("ops", "cancel", OP)
    assert (ran.code, ran.out, ran.err) == (0, "3f2a91c0 (install vllm) cancelled\n", f"{note}\n")


def test_history(corral: Corral) -> None:
    assert corral("ops", "history").out.splitlines()[1].split()[1:4] == ["install", "vllm", "completed"]
    assert corral("ops", "history", "--json").json()[0]["job_id"] == "op-0"
    assert corral("ops", "history", "--clear").code == 2
    assert corral("ops", "history", "--clear", "--yes").code == 0
    assert corral.fleet.calls[-1][:2] == ("DELETE", "/api/operations/history")


def test_watch_follows_what_is_under_way_and_to_the_end_if_wanted(corral: Corral) -> None:
    assert corral("ops", "watch").err == "No operation is running.\n"
    corral.fleet.operations = [WAITING]
    assert corral("ops", "watch").code == 3
    corral.fleet.wait_until_alone()
    corral.fleet.told = [[WAITING, DONE]]
    ran = corral("ops", "watch", "3f2a", "--to-the-end")
    assert ran.code == 0
    assert ran.out.splitlines()[-1] == "vllm: installed on attic"


def test_watch_as_json_has_a_line_per_change(corral: Corral) -> None:
    corral.fleet.operations = [WAITING]
    corral.fleet.told = [[WAITING, WAITING, DONE]]
    ran = corral("ops", "watch", OP, "--to-the-end", "--json")
    assert [json.loads(line)["state"] for line in ran.out.splitlines()] == ["waiting", "done"]


def test_ctrl_c_lets_go_and_says_how_to_come_back(corral: Corral, tmp_path: Path) -> None:
    corral.fleet.accepts = [operation("under_way", on("attic", phase="downloading", percentage=10.0))]
    corral.fleet.silent = True
    out = tmp_path / "out"
    with out.open("wb") as stream:
        watching = start(corral, "backends", "install", "vllm", stdout=stream, stderr=subprocess.PIPE)
    wait_for(lambda: b"downloading" in out.read_bytes())
    watching.send_signal(signal.SIGINT)
    _, err = watching.communicate(timeout=60)
    assert watching.returncode == 3
    assert b"corral ops watch 3f2a91c0" in err
    assert b"Traceback" not in err


def test_bars_on_a_terminal(corral: Corral) -> None:
    half = on("attic", phase="downloading", percentage=50.0, current_bytes=1048576, total_bytes=2097152, rate=1024.0)
    corral.fleet.accepts = [operation("under_way", half)]
    corral.fleet.told = [[operation("under_way", half), DONE]]
    ours, theirs = pty.openpty()
    watching = start(corral, "backends", "install", "vllm", stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    seen = b""
    try:
        while chunk := os.read(ours, 10_000):
            seen += chunk
    except OSError:  # the terminal's other end is closed
        pass
    assert watching.wait(60) == 0
    os.close(ours)
    text = seen.decode()
    assert "━━━" in text
    assert "1.0 MiB / 2.0 MiB" in text
    assert "vllm: installed on attic" in text
