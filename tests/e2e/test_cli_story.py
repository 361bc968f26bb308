"""Every command in a real fleet: what scripts read, what people read, and the exit codes between them."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.fleet import PATIENT, Fleet, http
from tests.support.processes import CORRAL, Process, free_port
from tests.support.waiting import wait_for

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Without a worker of its own: machines come and go by name here."""
    fleet = Fleet(tmp_path_factory.mktemp("story"), "--no-worker", **PATIENT)
    try:
        fleet.start()
        fleet.join_line()  # its greeting, and so its `local.json`, are there
        yield fleet
    finally:
        fleet.close()


@pytest.fixture(scope="module")
def barn(fleet: Fleet) -> Process:
    worker = fleet.join("barn", token=fleet.token("--pre-approved"))
    fleet.wait_status("barn", "healthy")
    return worker


def done(fleet: Fleet, *words: str) -> str:
    """Stdout of a command that succeeds."""
    ran = fleet.cli(*words)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def read(fleet: Fleet, *words: str) -> Any:
    """What a script reads: JSON, alone on stdout; and nothing it would have to hide from its user."""
    ran = fleet.cli(*words, "--json")
    assert (ran.returncode, ran.stderr) == (0, ""), ran.stderr
    return json.loads(ran.stdout)


def watch(fleet: Fleet, log: Path, *more: str) -> Process:
    watching = Process((*CORRAL, "nodes", "list", "--watch", *more), fleet.env, log)
    fleet.workers[f"watch {log}"] = watching
    wait_for(lambda: "barn" in watching.output(), "present state")
    return watching


def test_an_empty_fleet_says_how_to_go_on(fleet: Fleet) -> None:
    """First of all: nobody has joined yet."""
    ran = fleet.cli("nodes", "list")
    assert (ran.returncode, ran.stdout) == (0, "")
    assert "corral token create" in ran.stderr
    assert read(fleet, "nodes", "list") == []
    assert "there are no nodes yet" in fleet.refused("nodes", "show", "barn")


def test_a_worker_with_the_environment_of_localai_joins(fleet: Fleet) -> None:
    data = fleet.root / "worker-byre"
    env = {
        "LOCALAI_REGISTER_TO": fleet.url,
        "LOCALAI_REGISTRATION_TOKEN": fleet.token("--pre-approved"),
        "LOCALAI_NODE_NAME": "byre",
        "LOCALAI_NODE_LABELS": "tier=slow",
        "LOCALAI_HTTP_ADDR": f"127.0.0.1:{free_port()}",
        "CORRAL_DATA": str(data),
    }
    fleet.workers["byre"] = Process((*CORRAL, "worker"), fleet.env | env, fleet.root / "byre.log")
    assert fleet.wait_status("byre", "healthy")["labels"]["tier"] == "slow"


def test_lists_are_for_people_and_for_scripts(fleet: Fleet, barn: Process) -> None:
    table = done(fleet, "nodes", "list").splitlines()
    assert table[0].split()[:2] == ["NAME", "STATUS"]
    assert [line.split()[:2] for line in table[1:]] == [["barn", "healthy"], ["byre", "healthy"]]
    assert [node["name"] for node in read(fleet, "nodes", "list")] == ["barn", "byre"]
    assert read(fleet, "nodes", "list", "--status", "offline") == []
    shown = read(fleet, "nodes", "show", "barn")
    assert (shown["name"], shown["status"], shown["ingress_error"]) == ("barn", "healthy", "")
    assert f"id {shown['id']}" in " ".join(done(fleet, "nodes", "show", shown["id"]).split())
    assert {"version", "protocol", "python"} <= read(fleet, "version").keys()
    checks = {each["about"] for each in read(fleet, "doctor")}
    assert checks >= {"gateway", "controller", "bus", "bus access", "database"}


def test_watching_shows_a_change_and_leaves_in_order(fleet: Fleet, barn: Process, tmp_path: Path) -> None:
    people, script = watch(fleet, tmp_path / "people"), watch(fleet, tmp_path / "script", "--json")
    done(fleet, "nodes", "drain", "barn")
    wait_for(lambda: "barn: healthy → draining" in people.output(), "line about the change")

    def told() -> list[tuple[str, str]]:
        lines = [json.loads(line) for line in script.output().splitlines()]
        return [(line["before"], line["after"]) for line in lines if line["name"] == "barn"]

    wait_for(lambda: ("healthy", "draining") in told(), "record of the change")
    assert done(fleet, "nodes", "resume", "barn") == "barn accepts new requests and replicas again.\n"
    wait_for(lambda: told()[-1] == ("draining", "healthy"), "record of the way back")
    for watching in (people, script):
        watching.signal(signal.SIGINT)
        assert watching.wait() == 0, watching.output()
        assert "Traceback" not in watching.output()


def test_everything_that_waits_is_approved_at_once(fleet: Fleet) -> None:
    token = fleet.token("--uses", "2")
    for name in ("attic", "cellar"):
        fleet.join(name, token=token)
    for name in ("attic", "cellar"):
        fleet.wait_status(name, "pending")
    listed = done(fleet, "nodes", "list", "--status", "pending")
    assert "needs approval: corral nodes approve attic" in listed
    said = done(fleet, "nodes", "approve", "--all-pending").splitlines()
    assert sorted(said) == ["attic approved: healthy", "cellar approved: healthy"]
    for name in ("attic", "cellar"):
        fleet.wait_status(name, "healthy")
    again = fleet.cli("nodes", "approve", "--all-pending")
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "No node is pending.\n")
    assert done(fleet, "nodes", "approve", "attic") == "attic is already healthy\n"
    assert "give either names of nodes or --all-pending" in fleet.refused("nodes", "approve", code=2)


def test_labels_budget_and_replicas_go_round(fleet: Fleet, barn: Process) -> None:
    assert {"tier=fast", "room=west wing"} <= set(
        done(fleet, "nodes", "label", "barn", "tier=fast", "room=west wing").splitlines()
    )
    labels = read(fleet, "nodes", "label", "barn", "tier-")
    assert labels["room"] == "west wing"
    assert "tier" not in labels
    assert read(fleet, "nodes", "show", "barn")["labels"] == labels

    done(fleet, "nodes", "budget", "barn", "80%")
    assert done(fleet, "nodes", "max-replicas", "barn", "4") == "barn: at most 4 replicas of one model.\n"
    node = read(fleet, "nodes", "show", "barn")
    assert (node["vram_budget"], node["vram_budget_manually_set"]) == ("80%", True)
    assert (node["max_replicas_per_model"], node["max_replicas_per_model_manually_set"]) == (4, True)
    assert node["labels"]["node.replica-slots"] == "4"

    for word in ("budget", "max-replicas"):
        assert "from its next registration on" in done(fleet, "nodes", word, "barn", "--reset")
    barn.kill()
    fleet.join("barn")

    def as_the_worker_says() -> bool:
        node = fleet.nodes()["barn"]
        return (node["max_replicas_per_model"], node.get("vram_budget", "")) == (1, "")

    wait_for(as_the_worker_says, "what the worker itself says")
    fleet.wait_status("barn", "healthy")


@pytest.mark.parametrize(
    ("words", "code", "line"),
    [
        (("nodes", "show", "bran"), 1, "no node 'bran': did you mean barn"),
        (("nodes", "drain", "zeppelin"), 1, "no node 'zeppelin': the nodes are attic, barn, byre, cellar"),
        (("nodes", "budget", "barn", "lots"), 1, "lots"),
        (("nodes", "label", "barn", "no-equals-sign"), 2, "write KEY=VALUE to set, KEY- to remove"),
        (("nodes", "max-replicas", "barn", "0"), 2, "'N'"),
        (("nodes", "max-replicas", "barn"), 2, "give either a number or --reset"),
        (("nodes", "delete", "barn"), 2, "cannot ask for confirmation without a terminal: add --yes"),
        (("nodes", "list", "--colour"), 2, "--colour"),
        (("nodes", "fly"), 2, "fly"),
        (("sing",), 2, "sing"),
        (("token", "create", "--expires", "soon"), 2, "--expires"),
        (("token", "create", "--uses", "0"), 2, "--uses"),
        (("token", "revoke", "no-such-token"), 1, "corral token list"),
        (("keys", "create", "k", "--role", "king"), 2, "choose inference, viewer, admin"),
        (("keys", "revoke", "no-such-key"), 1, "no-such-key"),
        (("up", "--port", "nonsense"), 2, "--port"),
        (("worker", "--heartbeat-interval", "often"), 2, "--heartbeat-interval"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_an_exit_code(
    fleet: Fleet, barn: Process, words: tuple[str, ...], code: int, line: str
) -> None:
    assert line in fleet.refused(*words, code=code)


def test_one_unknown_name_does_not_keep_the_others_from_it(fleet: Fleet, barn: Process) -> None:
    ran = fleet.cli("nodes", "drain", "attic", "nobody", "byre")
    assert (ran.returncode, len(ran.stdout.splitlines())) == (1, 2), ran.stderr
    assert ran.stderr.startswith("corral: no node 'nobody'")
    assert [fleet.status(name) for name in ("attic", "byre")] == ["draining", "draining"]
    done(fleet, "nodes", "resume", "attic", "byre")
    assert done(fleet, "nodes", "drain", "attic", "--wait", "10s").endswith("attic is idle.\n")
    done(fleet, "nodes", "resume", "attic")


def test_keys_open_what_their_role_says_until_they_are_revoked(fleet: Fleet, barn: Process) -> None:
    made = {role: read(fleet, "keys", "create", f"my {role}", "--role", role) for role in ("inference", "viewer")}
    secrets = {role: each["secret"] for role, each in made.items()}
    ids = {role: each["key"]["id"] for role, each in made.items()}
    known = {key["id"]: key["role"] for key in read(fleet, "keys", "list")}
    assert known.items() >= {ids["inference"]: "inference", ids["viewer"]: "viewer"}.items()
    assert not any(secret in json.dumps(read(fleet, "keys", "list")) for secret in secrets.values())
    wait_for(lambda: fleet.api("GET", "/v1/models", key=secrets["inference"]).status == 200, "key at the gateway")

    assert "barn" in done(fleet, "nodes", "list", "--url", fleet.url, "--key", secrets["viewer"])
    where = ("--url", fleet.url, "--key")
    assert "yours has role viewer" in fleet.refused("nodes", "drain", "barn", *where, secrets["viewer"])
    assert "yours has role inference" in fleet.refused("nodes", "list", *where, secrets["inference"])
    assert "give a valid key" in fleet.refused("nodes", "list", *where, "ck_nobodys")

    assert done(fleet, "keys", "revoke", ids["inference"], ids["viewer"]).count("revoked") == 2
    wait_for(lambda: fleet.api("GET", "/v1/models", key=secrets["inference"]).status == 401, "end of the key")
    assert "give a valid key" in fleet.refused("nodes", "list", *where, secrets["viewer"])
    states = {key["id"]: key["state"] for key in read(fleet, "keys", "list", "--all")}
    assert (states[ids["inference"]], states[ids["viewer"]]) == ("revoked", "revoked")
    assert not ids.items() & {(role, key["id"]) for key in read(fleet, "keys", "list") for role in ids}


def test_a_token_is_good_until_it_is_revoked(fleet: Fleet) -> None:
    made = read(fleet, "token", "create", "--uses", "2", "--expires", "10m", "--name", "rack")
    assert made["join_command"] == f"corral join {fleet.url} --token {made['secret']}"
    token = next(each for each in read(fleet, "token", "list") if each["id"] == made["token"]["id"])
    assert (token["name"], token["uses_left"], token["state"]) == ("rack", 2, "active")
    assert done(fleet, "token", "revoke", token["id"]) == f"{token['id']} revoked\n"
    said = fleet.refused(*made["join_command"].split()[1:], "--name", "late", "--data", str(fleet.root / "late"))
    assert "was revoked" in said
    printed = fleet.cli("token", "create")
    assert re.match(rf"printf %s cj_\w+ \| sh -c 'u={re.escape(fleet.url)};", printed.stdout)
    assert f"Where Corral is installed already: corral join {fleet.url} --token cj_" in printed.stderr
    assert "corral nodes approve NAME" in printed.stderr, "advice is not in the way of a script"


def test_a_machine_is_replaced_and_another_deleted(fleet: Fleet, barn: Process) -> None:
    before = fleet.nodes()["byre"]
    assert done(fleet, "nodes", "replace", "byre").startswith("byre: the next machine that joins with this name")
    old = fleet.workers["byre"]
    assert old.wait(60) == 1
    assert old.output().splitlines()[-1].startswith("corral worker: the controller refuses the join token")
    line = f"corral join {fleet.url} --token {fleet.token()} --name byre --port 0"
    heir = fleet.paste(line, "heir")
    fleet.wait_status("byre", "pending")
    done(fleet, "nodes", "approve", "byre")
    assert fleet.wait_status("byre", "healthy")["id"] == before["id"]

    assert done(fleet, "nodes", "delete", "byre", "--yes") == "byre deleted\n"
    assert heir.wait(60) == 1
    assert "was deleted" in heir.output().splitlines()[-1]
    assert "byre" not in fleet.nodes()


def test_a_localai_worker_is_told_what_it_needs(fleet: Fleet) -> None:
    ran = fleet.cli("join", fleet.url, "--token", "shared", "--localai")
    assert ran.returncode == 0
    assert f"export LOCALAI_NATS_URL=nats://127.0.0.1:{fleet.bus_port}\n" in ran.stdout
    assert all(line.startswith("export LOCALAI_") for line in ran.stdout.splitlines())


def test_without_a_fleet_every_command_says_where_to_get_one(fleet: Fleet, tmp_path: Path) -> None:
    lonely = Fleet(tmp_path)
    for words in (("nodes", "list"), ("token", "create"), ("keys", "list", "--json")):
        ran = lonely.cli(*words)
        assert (ran.returncode, ran.stdout) == (1, "")
        assert ran.stderr.startswith("corral: no fleet found: start one with `corral up`, or say where it is")
    nowhere = f"http://127.0.0.1:{lonely.port}"
    said = lonely.refused("nodes", "list", "--url", nowhere, "--key", "ck_x")
    assert said.startswith(f"corral: nothing answers at {nowhere} (Connection refused): is the fleet running?")
    assert "no key" in lonely.refused("nodes", "list", "--url", fleet.url), "a key goes where it was meant for"
    assert http("GET", f"{fleet.url}/readyz").status == 200
