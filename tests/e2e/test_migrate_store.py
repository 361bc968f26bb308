"""From SQLite to PostgreSQL by the command: the same fleet afterwards, to people, programs and workers alike."""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import Cluster
from tests.support.fleet import Fleet
from tests.support.postgres import Postgres, postgres
from tests.support.processes import Process
from tests.support.waiting import wait_for

__all__ = ["postgres"]

pytestmark = pytest.mark.timeout(180)

# What a person decided or a machine is; the rest (heartbeats, free memory, versions of rows) goes on moving.
LASTING = (
    *("id", "name", "labels", "max_replicas_per_model", "max_replicas_per_model_manually_set"),
    *("vram_budget", "vram_budget_manually_set", "created_at", "platform"),
)


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path)
    try:
        yield fleet.start()
    finally:
        fleet.close()


def lasting(fleet: Fleet) -> dict[str, dict[str, Any]]:
    return {name: {field: node.get(field) for field in LASTING} for name, node in fleet.nodes().items()}


def listed(fleet: Fleet, noun: str) -> dict[str, tuple[Any, ...]]:
    """What does not change by itself."""
    rows = json.loads(fleet.cli(noun, "list", "--all", "--json").stdout)
    fields = {"token": ("name", "uses", "uses_left", "pre_approved"), "keys": ("name", "role", "models", "state")}[noun]
    return {row["id"]: tuple(map(str, (row[field] for field in fields))) for row in rows}


def digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def furnish(fleet: Fleet) -> tuple[Process, str, str]:
    """A fleet that somebody has lived in: its worker, a client's key and a join token for three."""
    worker = fleet.join("barn", token=fleet.token("--pre-approved"))
    fleet.wait_status("barn", "healthy")
    for words in (("label", "barn", "tier=fast", "room=öst"), ("budget", "barn", "80%"), ("max-replicas", "barn", "3")):
        assert fleet.cli("nodes", *words).returncode == 0
    made = fleet.cli("keys", "create", "notebook", "--model", "smollm2", "--json")
    key = str(json.loads(made.stdout)["secret"])
    goner = fleet.join("goner", token=fleet.token("--pre-approved"))
    fleet.wait_status("goner", "healthy")
    assert goner.stop() == 0
    assert fleet.cli("nodes", "delete", "goner", "--yes").returncode == 0  # it does not know yet
    return worker, key, fleet.token("--uses", "3", "--pre-approved", "--name", "rack")


@pytest.mark.long
def test_a_fleet_moves_and_everybody_finds_it_as_it_was(fleet: Fleet, postgres: Postgres) -> None:
    worker, key, token = furnish(fleet)
    before, keys, tokens = lasting(fleet), listed(fleet, "keys"), listed(fleet, "token")
    url = postgres.new_database("template0")
    words = ("migrate-store", "--data", str(fleet.data), "--to", url)
    assert fleet.up is not None
    assert fleet.refused(*words) == f"corral: the fleet in {fleet.data} is running (pid {fleet.up.pid}): stop it first"

    assert fleet.up.stop() == 0
    old = digest(fleet.data / "controller" / "corral.db")
    moved = fleet.cli(*words, "--json")
    assert moved.returncode == 0, moved.stderr
    assert {"table": "nodes", "rows": 2} in json.loads(moved.stdout)
    assert "the target is not empty" in fleet.refused(*words)
    assert digest(fleet.data / "controller" / "corral.db") == old, "the way back stays open"

    fleet.env["CORRAL_STORE"] = url
    fleet.start()
    assert fleet.api("GET", "/api/cluster").json()["store"] == "postgresql"
    assert (lasting(fleet), listed(fleet, "keys")) == (before, keys)
    assert tokens.items() <= listed(fleet, "token").items(), "this start made some more"
    assert fleet.api("GET", "/v1/models", key=key).status == 200

    seen = fleet.nodes()["barn"]["last_heartbeat"]
    wait_for(lambda: fleet.nodes()["barn"]["last_heartbeat"] > seen, "worker that goes on as itself")
    fleet.wait_status("barn", "healthy")
    assert worker.running
    fleet.join("byre", token=token)
    fleet.wait_status("byre", "healthy")
    assert "was deleted" in fleet.refused("join", "--data", str(fleet.root / "worker-goner"))


def test_a_database_that_a_controller_uses_is_not_copied(tmp_path: Path, postgres: Postgres) -> None:
    cluster = Cluster(tmp_path, f"sqlite:///{tmp_path}/corral.db", members=1)
    fleet = Fleet(tmp_path / "person")  # only its command line
    fleet.root.mkdir()
    member = cluster.members[0]
    words = ("migrate-store", "--from", cluster.store_url, "--to", postgres.new_database())
    try:
        cluster.start_controller(member)
        cluster.wait_ready(member)
        said = fleet.refused(*words)
        assert f"a controller on {socket.gethostname()} used this database" in said
        assert "stop every controller" in said
        assert member.controller is not None
        assert member.controller.stop() == 0
        assert fleet.cli(*words).stdout.endswith("copied and verified.\n"), "one that left in order is not waited for"
    finally:
        cluster.close()


def test_what_cannot_be_copied_is_one_line(tmp_path: Path, postgres: Postgres) -> None:
    fleet = Fleet(tmp_path)
    nothing = f"postgresql://postgres@/nothing_there?host={postgres.folder}"
    assert "there is no database" in fleet.refused("migrate-store", "--data", str(fleet.data), "--to", nothing)
    (tmp_path / "text.db").write_text("not a database at all, and long enough to be read as one\n" * 100)
    source = f"sqlite:///{tmp_path}/text.db"
    assert "is not a SQLite database" in fleet.refused("migrate-store", "--from", source, "--to", nothing)
    assert fleet.cli("migrate-store", "--from", source).returncode == 2
