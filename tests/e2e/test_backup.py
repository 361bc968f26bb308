"""Back up a running fleet, wipe its machine, restore: the same fleet afterwards, to people, programs and workers."""

from __future__ import annotations

import contextlib
import json
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from tests.support.fleet import Fleet
from tests.support.grown_fleet import grown_fleet, order
from tests.support.waiting import wait_for

pytestmark = pytest.mark.timeout(300)

HELLO = {"model": "kept", "messages": [{"role": "user", "content": "hello"}]}


def known(fleet: Fleet) -> dict[str, Any]:
    """What a person finds in the fleet, and what must not be lost."""

    def rows(*words: str, fields: tuple[str, ...]) -> list[tuple[str, ...]]:
        listed = json.loads(fleet.cli(*words, "--json").stdout)
        return sorted(tuple(str(row[field]) for field in fields) for row in listed)

    return {
        "nodes": {name: (node["id"], node["labels"].get("tier")) for name, node in fleet.nodes().items()},
        "models": rows("models", "list", fields=("id", "config_revision", "created_at")),
        "keys": rows("keys", "list", "--all", fields=("id", "name", "role", "state")),
        "operations": rows("ops", "list", "--all", fields=("operation_id", "kind", "backend", "created_at")),
        "requests": {row["id"] for row in fleet.api("GET", "/api/requests").json()["requests"]},
    }


def furnish(fleet: Fleet) -> str:
    """Use the fleet as a person does; return the key of a program."""
    assert fleet.cli("nodes", "label", "barn", "tier=fast").returncode == 0
    made = fleet.api("POST", "/api/models", {"definition": {"name": "kept", "backend": "mock"}})
    assert made.status == 201, made.body
    key = str(json.loads(fleet.cli("keys", "create", "notebook", "--json").stdout)["secret"])
    wait_for(lambda: answers(fleet, key), "an answer of the model")
    wait_for(lambda: fleet.api("GET", "/api/requests").json()["requests"], "the receipt of the request")
    wait_for(lambda: json.loads(fleet.cli("ops", "list", "--json").stdout) == [], "the end of the installation")
    return key


def answers(fleet: Fleet, key: str) -> bool:
    answer = fleet.http("POST", "/v1/chat/completions", key=key, body=HELLO)
    return answer.status == 200 and b"hello" in answer.body


def wipe(fleet: Fleet) -> dict[str, dict[str, Any]]:
    """The machine of the controller is lost; the other machines go on. Returns the nodes as they were at the end."""
    assert fleet.up is not None
    nodes = fleet.nodes()
    assert fleet.up.stop() == 0
    shutil.rmtree(fleet.data)
    return nodes


def restore(fleet: Fleet, file: Path, *words: str) -> str:
    """Restore, and return what the command says on stderr. What the controller knew about ingresses is forgotten."""
    restored = fleet.cli("restore", str(file), "--data", str(fleet.data), *words)
    assert restored.returncode == 0, restored.stderr
    with contextlib.closing(sqlite3.connect(fleet.data / "controller" / "corral.db")) as database, database:
        database.execute("UPDATE nodes SET ingress_ok = NULL")
    return restored.stderr


def wait_for_same_node(fleet: Fleet, name: str, before: dict[str, Any]) -> None:
    """The backup says "healthy" too: the worker must have sent heartbeats since, and answer on the bus and at its
    ingress."""

    def look() -> bool:
        node = fleet.nodes()[name]
        assert (node["id"], node["status"]) == (before["id"], "healthy"), node
        assert node["last_heartbeat"] > before["last_heartbeat"]
        return fleet.proven_ingresses()[name] is True

    wait_for(look, f"{name}, as the node that it was", 90)
    if not fleet.tls:  # `order` speaks no TLS
        assert "backends" in order(fleet, name, "backend.list", {}, timeout_s=60)


def test_a_fleet_comes_back_with_its_secrets(tmp_path: Path) -> None:
    passphrase = tmp_path / "passphrase"
    passphrase.write_text("four words or more\n")
    secret = ("--passphrase-file", str(passphrase))
    file = tmp_path / "fleet.backup"
    with grown_fleet(tmp_path, "barn", options=("--lan",)) as fleet:
        key = furnish(fleet)
        before, ca, admin = known(fleet), fleet.ca.read_text(), fleet.key
        made = fleet.cli("backup", str(file), *secret)
        assert made.returncode == 0, made.stderr
        assert f"from {fleet.data}: 2 nodes, 1 model," in made.stdout
        assert "is running" in fleet.refused("restore", str(file), "--data", str(fleet.data), *secret)

        nodes = wipe(fleet)
        restore(fleet, file, *secret)
        fleet.start()
        assert (fleet.ca.read_text(), fleet.key) == (ca, admin)
        assert len(nodes) == 2
        for name, node in nodes.items():
            wait_for_same_node(fleet, name, node)
        assert fleet.workers["barn-0"].running, "the other machine has noticed an outage, and nothing else"
        after = known(fleet)
        assert before["requests"] <= after.pop("requests")
        assert after == {kind: rows for kind, rows in before.items() if kind != "requests"}
        wait_for(lambda: answers(fleet, key), "an answer of the same model to the same key", 90)


@pytest.mark.parametrize(
    "options", [pytest.param(("--lan",), id="TLS"), pytest.param((), id="plain", marks=pytest.mark.long)]
)
def test_without_secrets_machines_keep_their_nodes(options: tuple[str, ...], tmp_path: Path) -> None:
    """With TLS they do not trust the new CA, so they must join again. Without TLS they reconnect by themselves."""
    file = tmp_path / "fleet.backup"
    fleet = Fleet(tmp_path, *options, "--no-worker")
    with contextlib.closing(fleet):
        fleet.start()
        fleet.join("barn", token=fleet.token("--pre-approved"))
        fleet.wait_status("barn", "healthy")
        key = str(json.loads(fleet.cli("keys", "create", "notebook", "--json").stdout)["secret"])
        admin = fleet.key
        made = fleet.cli("backup", str(file))
        assert made.returncode == 0, made.stderr
        assert "machines that use TLS must join again" in made.stderr

        nodes = wipe(fleet)
        assert "The backup has no secrets" in restore(fleet, file)
        fleet.start()
        assert fleet.key != admin
        for each in (key, admin, fleet.key):
            assert fleet.http("GET", "/v1/models", key=each).status == 200
        if options:
            wait_for(lambda: "CERTIFICATE_VERIFY_FAILED" in fleet.workers["barn-0"].output(), "a worker that refuses")
            fleet.wait_status("barn", "offline")
            assert fleet.workers["barn-0"].stop() == 0
            fleet.join("barn", token=fleet.token())  # not pre-approved: the node is approved already
        wait_for_same_node(fleet, "barn", nodes["barn"])
