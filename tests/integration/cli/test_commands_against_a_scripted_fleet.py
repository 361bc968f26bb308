"""Every command that talks to a fleet: what it prints, what it sends, how it ends."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from corral.cli.commands import COMMANDS
from corral.cli.run import load
from tests.integration.cli.conftest import Corral, start
from tests.support.scripted_fleet import event, node, refused
from tests.support.waiting import wait_for


def changes(corral: Corral) -> list[tuple[str, str]]:
    return [(method, path) for method, path, _ in corral.fleet.calls if method != "GET"]


@pytest.mark.parametrize(
    "words",
    [
        ("nodes", "list", "--status", "healthy"),
        ("nodes", "show", "attic"),
        ("nodes", "drain", "attic"),
        ("ops", "list", "--all"),
        ("keys", "list"),
    ],
)
def test_calls_without_a_terminal_import_neither_aiohttp_nor_rich(corral: Corral, words: tuple[str, ...]) -> None:
    """They take longer to import than everything else that such a command does."""
    program = (
        "import sys; from corral.cli.main import main; "
        f"code = main({list(words)}); print(*sys.modules, file=sys.stderr); sys.exit(code)"
    )
    ran = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    unwanted = {"aiohttp", "yarl", "rich", "structlog", "email", "http.client", "cryptography", "tempfile"}
    unwanted |= {"corral.client.streams", "corral.client.events", "corral.contract.bundles"}
    if "nodes" in words:
        unwanted |= {"random", "corral.contract.catalogue", "corral.contract.installs", "corral.contract.rollouts"}
    assert unwanted & set(ran.stderr.split()) == set()


def test_nodes_list_is_a_table_for_people(corral: Corral) -> None:
    ran = corral("nodes", "list")
    assert ran.code == 0
    lines = ran.out.splitlines()
    assert lines[0].split()[:2] == ["NAME", "STATUS"]
    assert lines[1].startswith("attic   healthy")
    assert "corral nodes approve cellar" in lines[2]
    assert "\x1b" not in ran.out
    assert ran.err == ""


def test_nodes_list_is_json_for_scripts(corral: Corral) -> None:
    ran = corral("nodes", "list", "--json", "--status", "pending")
    assert [each["name"] for each in ran.json()] == ["cellar"]
    assert ran.json()[0]["labels"] == {}
    assert ran.err == ""
    ran = corral("nodes", "list", "--status", "sick")
    assert (ran.code, ran.out) == (2, "")
    assert "'sick' is not a status: choose pending, healthy" in ran.err


@pytest.mark.parametrize("noun", ["nodes", "token", "keys"])
def test_every_list_has_json_also_when_empty(corral: Corral, noun: str) -> None:
    corral.fleet.nodes = []
    assert corral(noun, "list", "--json").json() == []
    ran = corral(noun, "list")
    assert (ran.code, ran.out) == (0, "")
    assert ran.err.count("\n") == 1


def test_show_explains(corral: Corral) -> None:
    corral.fleet.nodes.append(node("shed", "offline", status_reason="silent for 70 s", ingress_error="refused"))
    out = corral("nodes", "show", "shed").out
    assert "offline: silent for 70 s" in out
    assert "refused" in out
    assert corral("nodes", "show", "shed", "--json").json()["status_reason"] == "silent for 70 s"


def test_an_unknown_node_is_answered_with_near_names(corral: Corral) -> None:
    ran = corral("nodes", "show", "atic")
    assert (ran.code, ran.out, ran.err) == (1, "", "corral: no node 'atic': did you mean attic?\n")


def test_approve_several_and_all_pending(corral: Corral) -> None:
    ran = corral("nodes", "approve", "cellar", "attic")
    assert ran.out == "cellar approved: healthy\nattic is already healthy\n"
    corral.fleet.nodes += [node("shed", "pending"), node("barn", "pending")]
    assert corral("nodes", "approve", "--all-pending").out.count("approved") == 2
    assert changes(corral) == [
        ("POST", "/api/nodes/id-cellar/approve"),
        ("POST", "/api/nodes/id-shed/approve"),
        ("POST", "/api/nodes/id-barn/approve"),
    ]
    ran = corral("nodes", "approve", "--all-pending")
    assert (ran.code, ran.err) == (0, "No node is pending.\n")
    assert corral("nodes", "approve").code == 2
    assert corral("nodes", "approve", "x", "--all-pending").code == 2


def test_one_that_fails_does_not_stop_the_rest(corral: Corral) -> None:
    ran = corral("nodes", "resume", "nobody", "attic")
    assert ran.code == 1
    assert ran.out == "attic accepts new requests and replicas again.\n"
    assert ran.err.startswith("corral: no node 'nobody'")


def test_drain_can_wait_and_says_when_it_is_still_under_way(corral: Corral) -> None:
    assert corral("nodes", "drain", "attic", "--wait", "5s").code == 0
    corral.fleet.nodes[0]["in_flight_count"] = 2
    ran = corral("nodes", "drain", "attic", "--wait", "50ms")
    assert ran.code == 3
    assert ran.err == "corral: attic still has 2 requests in flight; see `corral nodes show attic`\n"
    corral.fleet.nodes[0]["in_flight_count"] = 0
    corral.fleet.nodes[0]["in_flight_unknown"] = "the node cannot reach the bus"
    ran = corral("nodes", "drain", "attic", "--wait", "50ms")
    assert ran.code == 3
    assert "the number of requests on attic is unknown: the node cannot reach the bus" in ran.err
    assert "nothing left to do" not in ran.out
    assert corral("nodes", "drain", "attic", "--wait", "soon").code == 2


def test_delete_asks_and_without_anybody_to_ask_needs_yes(corral: Corral) -> None:
    ran = corral("nodes", "delete", "attic")
    assert ran.code == 2
    assert "--yes" in ran.err
    assert changes(corral) == []
    assert corral("nodes", "delete", "attic", "--yes").out == "attic deleted\n"
    assert changes(corral) == [("DELETE", "/api/nodes/id-attic")]


def test_labels(corral: Corral) -> None:
    assert corral("nodes", "label", "attic", "tier=fast", "room=top").out == "room=top\ntier=fast\n"
    assert corral("nodes", "label", "attic", "room-", "--json").json() == {"tier": "fast"}
    assert corral("nodes", "label", "attic").out == "tier=fast\n"
    assert corral("nodes", "label", "attic", "nonsense").code == 2


def test_budget_and_max_replicas(corral: Corral) -> None:
    assert corral("nodes", "budget", "attic", "80%").code == 0
    assert corral("nodes", "budget", "attic", "--reset").code == 0
    assert corral("nodes", "max-replicas", "attic", "4").out == "attic: at most 4 replicas of one model.\n"
    assert corral("nodes", "max-replicas", "attic", "--reset").code == 0
    bodies = [body for method, _, body in corral.fleet.calls if method == "PUT"]
    assert bodies == [{"value": "80%"}, {"value": 4}]
    for wrong in (["budget", "attic"], ["max-replicas", "attic", "0"], ["max-replicas", "attic", "4", "--reset"]):
        assert corral("nodes", *wrong).code == 2
    corral.fleet.answers[("PUT", "/api/nodes/id-attic/vram-budget")] = refused(
        400, "500% is more than all", "node_error"
    )
    ran = corral("nodes", "budget", "attic", "500%")
    assert (ran.code, ran.err) == (1, "corral: 500% is more than all\n")


def test_replace(corral: Corral) -> None:
    assert corral("nodes", "replace", "attic").code == 0
    assert changes(corral) == [("POST", "/api/nodes/id-attic/replace")]


def test_token_create_prints_the_join_line_and_nothing_else_on_stdout(corral: Corral) -> None:
    ran = corral("token", "create", "--uses", "unlimited", "--expires", "never", "--pre-approved", "--name", "rack")
    assert ran.out == f"corral join {corral.fleet.url} --token cj_x\n"
    asked = {"name": "rack", "uses": None, "ttl_s": None, "pre_approved": True, "url": corral.fleet.url}
    assert corral.fleet.calls[-1][2] == asked
    assert corral("token", "create", "--json").json()["secret"] == "cj_x"
    for wrong in (["--uses", "0"], ["--uses", "many"], ["--expires", "soon"], ["--expires", "0"]):
        ran = corral("token", "create", *wrong)
        assert (ran.code, ran.err.count("\n")) == (2, 1)
    assert corral("token", "revoke", "t1").out == "t1 revoked\n"
    assert corral("token", "revoke", "unknown").code == 1


def test_token_list_shows_active_ones_unless_all_are_wanted(corral: Corral) -> None:
    corral.fleet.tokens = [{"id": "t1", "state": "active"}, {"id": "t2", "state": "used"}]
    assert [each["id"] for each in corral("token", "list", "--json").json()] == ["t1"]
    assert [each["id"] for each in corral("token", "list", "--all", "--json").json()] == ["t1", "t2"]
    assert "t2" in corral("token", "list", "--all").out


def test_keys(corral: Corral) -> None:
    ran = corral("keys", "create", "guests", "--model", "a", "--model", "b", "--concurrent", "2", "--expires", "30d")
    assert ran.out == "ck_new\n"
    assert corral.fleet.calls[-1][2] == {
        "name": "guests",
        "models": ["a", "b"],
        "limits": {"concurrent": 2},
        "ttl_s": 30 * 86400,
    }
    assert corral("keys", "create", "x", "--role", "king").code == 2
    corral.fleet.keys[-1]["limits"] = {"requests_per_min": 60, "concurrent": 2}
    listed = corral("keys", "list").out.splitlines()
    assert listed[1].split()[:3] == ["k2", "guests", "inference"]
    assert "LIMITS" in listed[0]
    assert "60 requests/min, 2 concurrent" in listed[1]
    assert corral("keys", "revoke", "k2").out == "k2 revoked\n"


def test_a_wrong_key_is_one_line(corral: Corral) -> None:
    ran = corral("nodes", "list", "--key", "ck_wrong")
    assert ran.code == 1
    assert ran.err == "corral: this key is not known: give a valid key with --key or CORRAL_KEY\n"


def test_no_fleet_and_nobody_there_are_one_line(
    no_fleet: None, corral: Corral, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "is the fleet running" in corral("nodes", "list", "--url", "http://127.0.0.1:1").err
    monkeypatch.delenv("CORRAL_URL")
    ran = corral("nodes", "list")
    assert (ran.code, ran.err.count("\n")) == (1, 1)
    assert "corral up" in ran.err


def test_misuse_is_one_line_with_the_way_to_the_help(corral: Corral) -> None:
    for words in (["bogus"], ["nodes", "bogus"], ["nodes", "list", "--bogus"], ["nodes", "show"]):
        ran = corral(*words)
        assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1)
        assert "--help`" in ran.err
    assert "approve" in corral("nodes").err


@pytest.mark.parametrize(
    "words",
    [
        ("chat", "", "hello"),
        ("models", "show", ""),
        ("models", "load", " "),
        ("why", "model", ""),
        ("why", "node", ""),
        ("logs", ""),
        ("logs", "tiny@"),
        ("nodes", "show", ""),
        ("requests", "--model", ""),
    ],
)
def test_an_empty_name_is_told_as_such_and_means_nothing_else(corral: Corral, words: tuple[str, ...]) -> None:
    ran = corral(*words)
    assert ran.code in (1, 2)
    assert "is empty" in ran.err or "give the name of a model or a backend" in ran.err
    assert changes(corral) == []


def test_every_command_and_subcommand_has_help_with_an_example(corral: Corral) -> None:
    assert corral("--help").code == 0
    for name in COMMANDS:
        command = load(name)
        inner = [[name, each] for each in getattr(command, "commands", {})] or [[name]]
        for words in inner:
            ran = corral(*words, "--help")
            assert ran.code == 0
            assert ran.err == ""
            if name != "version":
                assert re.search(rf"Examples:\n\s+(\S+=\S+ )?corral {' '.join(words)}", ran.out), words


def test_version(corral: Corral) -> None:
    assert corral("version", "--json").json()["protocol"] == 1
    assert corral("version").out.startswith("corral ")


def test_watch_prints_changes_and_leaves_in_peace_on_ctrl_c(corral: Corral, tmp_path: Path) -> None:
    corral.fleet.streams = [
        [
            event("node", node("attic")),
            event("ready", {}),
            event("node", node("attic", "offline", status_reason="silent")),
        ]
    ]
    out = tmp_path / "out"
    with out.open("wb") as stream:
        watching = start(corral, "nodes", "list", "--watch", stdout=stream, stderr=subprocess.PIPE)
    wait_for(lambda: b"offline" in out.read_bytes())
    watching.send_signal(signal.SIGINT)
    _, err = watching.communicate(timeout=60)
    assert out.read_text() == "attic: healthy\nattic: healthy → offline (silent)\n"
    assert (watching.returncode, err) == (0, b"")


def test_watch_on_a_terminal_draws_a_table(corral: Corral) -> None:
    corral.fleet.streams = [[event("node", node("attic")), event("ready", {})]]
    ours, theirs = pty.openpty()
    watching = start(corral, "nodes", "list", "--watch", stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    seen = b""
    while b"attic" not in seen:
        seen += os.read(ours, 10_000)
    watching.send_signal(signal.SIGINT)
    try:
        while os.read(ours, 10_000):
            pass
    except OSError:  # the terminal's other end is closed
        pass
    assert watching.wait(60) == 0
    os.close(ours)


def test_ctrl_c_elsewhere_is_130_without_a_trace(corral: Corral) -> None:
    corral.fleet.nodes[0]["in_flight_count"] = 1
    waiting = start(corral, "nodes", "drain", "attic", "--wait", "1h", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    wait_for(lambda: sum(path == "/api/nodes/attic" for _, path, _ in corral.fleet.calls) >= 3)
    waiting.send_signal(signal.SIGINT)
    _, err = waiting.communicate(timeout=60)
    assert (waiting.returncode, err) == (130, b"")


def test_a_reader_that_leaves_is_no_error_worth_a_trace(corral: Corral) -> None:
    corral.fleet.nodes = [node(f"n{number:04}") for number in range(3000)]
    listing = start(corral, "nodes", "list", "--json", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert listing.stdout is not None
    assert listing.stderr is not None
    listing.stdout.read(10)
    listing.stdout.close()
    assert listing.stderr.read() == b""
    listing.stderr.close()
    assert listing.wait(60) == 1
