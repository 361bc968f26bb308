"""`corral backup` and `corral restore`: what comes back, what is refused, and what a refusal leaves."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from corral.cli.backup import commands, parts, seal
from corral.cli.backup import restore as restoring
from corral.cli.common.data_folder import DataFolder, lock_file
from corral.cli.main import main
from corral.store import open_store
from corral.store.tables import api_keys, cluster_secrets, controllers, join_tokens, models, nodes
from corral.store.tables.api_keys import ApiKey
from corral.store.tables.join_tokens import JoinToken
from tests.integration.store.rows import NOON, a_model, a_node
from tests.support.postgres import Postgres, postgres

__all__ = ["postgres"]

PASSPHRASE = "four words or more"
SECRETS = {
    "secrets/admin.key": "ck_admin",
    "secrets/ca.crt": "-- CA --",
    "secrets/ca.key": "-- CA key --",
    "secrets/bus/account.seed": "SAseed",
    "worker/identity.json": '{"node_token":"cn_token"}',
}
PLAIN = {"ports.json": '{"--port":18080}', "controller/models/chat.yaml": "uri: https://anna:s3cret@models.example/x"}


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("CORRAL_STORE", "CORRAL_DATA", "CORRAL_BACKUP_PASSPHRASE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CORRAL_CONFIG_DIR", str(tmp_path / "config"))
    monkeypatch.setattr(seal.Seal, "__init__", _cheap(seal.Seal.__init__))


def _cheap(make: Any) -> Any:
    """The costs of a real key are for attackers; a header states its own."""
    return lambda self, **given: make(self, **({"n": 2**10} | given))


async def fill(url: str, *, alive: bool = False) -> None:
    async with open_store(url) as store, store.write() as tx:
        await nodes.insert(tx, a_node(name="attic"))
        await models.put(
            tx, a_model("chat", definition={"name": "chat", "uri": "https://anna:s3cret@models.example/x"})
        )
        await api_keys.insert(tx, ApiKey(id="k", name="k", secret_hash="h", role="admin", created_at=NOON))
        await join_tokens.insert(tx, JoinToken(id="t", name="t", secret_hash="h", created_at=NOON))
        await cluster_secrets.get_or_create(tx, "signing_key", lambda: "the signing key")
        if alive:
            await controllers.seen(tx, "c", host="attic", version="0.1.0")


def make_fleet(root: Path, *, alive: bool = False) -> DataFolder:
    for name, text in (SECRETS | PLAIN).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    folder = DataFolder(root)
    asyncio.run(fill(f"sqlite:///{folder.database}", alive=alive))
    return folder


@pytest.fixture
def fleet(tmp_path: Path) -> DataFolder:
    return make_fleet(tmp_path / "data")


@pytest.fixture
def passphrase(tmp_path: Path) -> str:
    file = tmp_path / "passphrase"
    file.write_text(f"{PASSPHRASE}\n")
    return str(file)


@pytest.fixture
def sealed(fleet: DataFolder, passphrase: str, tmp_path: Path) -> Path:
    file = tmp_path / "sealed.backup"
    assert main(["backup", str(file), "--data", str(fleet.root), "--passphrase-file", passphrase]) == 0
    return file


@pytest.fixture
def unsealed(fleet: DataFolder, tmp_path: Path) -> Path:
    file = tmp_path / "unsealed.backup"
    assert main(["backup", str(file), "--data", str(fleet.root)]) == 0
    return file


def restore(file: Path, root: Path, *more: str) -> int:
    return main(["restore", str(file), "--data", str(root), *more])


def texts(root: Path) -> dict[str, str]:
    """Every file below, but databases."""
    return {
        path.relative_to(root).as_posix(): path.read_text()
        for path in sorted(root.rglob("*"))
        if path.is_file() and not path.name.startswith("corral.db") and path.name != "lock"
    }


def rows(root: Path, statement: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(DataFolder(root).database)) as found:
        return found.execute(statement).fetchall()


def said(capsys: pytest.CaptureFixture[str]) -> str:
    error = capsys.readouterr().err
    assert "Traceback" not in error
    assert len([line for line in error.splitlines() if line.startswith("corral: ")]) == 1, error
    return error


def test_with_secrets_everything_comes_back(
    sealed: Path, passphrase: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sealed.stat().st_mode & 0o777 == 0o600
    whole = sealed.read_bytes()
    assert not [each for each in (b"ck_admin", b"SAseed", b"signing", b"attic\0", b"s3cret") if each in whole]
    capsys.readouterr()
    new = tmp_path / "new"
    assert restore(sealed, new, "--passphrase-file", passphrase, "--dry-run", "--json") == 0
    plan = json.loads(capsys.readouterr().out)
    assert set(plan["files"]) == (SECRETS | PLAIN).keys()
    assert not new.exists(), "a look changes nothing"
    assert restore(sealed, new, "--passphrase-file", passphrase, "--json") == 0
    done = json.loads(capsys.readouterr().out)
    assert (done["rows"]["nodes"], done["rows"]["join_tokens"], done["has_secrets"]) == (1, 0, True)
    assert texts(new) == SECRETS | PLAIN
    assert rows(new, "SELECT name FROM nodes") == [("attic",)]
    assert rows(new, "SELECT value FROM cluster_secrets") == [("the signing key",)]
    assert rows(new, "SELECT count(*) FROM join_tokens") == [(0,)]
    for each in ("secrets", "secrets/bus", "controller", "worker"):
        assert (new / each).stat().st_mode & 0o777 == 0o700
    assert (new / "secrets/admin.key").stat().st_mode & 0o777 == 0o600
    assert DataFolder(new).database.stat().st_mode & 0o777 == 0o600


def test_without_secrets_nothing_in_the_file_is_one(
    unsealed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new = tmp_path / "new"
    assert restore(unsealed, new) == 0
    answer = capsys.readouterr()
    assert "1 node, 1 model, 1 API key" in answer.out
    assert "has no secrets" in answer.err
    assert "must join again" in answer.err
    assert texts(new) == {**PLAIN, "controller/models/chat.yaml": "uri: https://***@models.example/x"}
    assert rows(new, "SELECT count(*) FROM cluster_secrets") == [(0,)]
    assert "s3cret" not in str(rows(new, "SELECT definition FROM models"))


def test_no_secret_is_in_a_backup_without_passphrase(unsealed: Path, tmp_path: Path) -> None:
    unpacked = tmp_path / "unpacked"
    unpacked.mkdir()
    command = f"tail -n +3 {unsealed} | tar -xz -C {unpacked}"
    subprocess.run(["bash", "-c", command], check=False, capture_output=True)  # gzip warns about the sum at the end
    found = [path for path in unpacked.rglob("*") if path.is_file()]
    assert {"contents.json", "store.db", "ports.json", "chat.yaml"} == {path.name for path in found}
    for path in found:
        for secret in (*SECRETS.values(), "signing key", "s3cret"):
            assert secret.encode() not in path.read_bytes(), path


@pytest.mark.parametrize("source", ["sqlite", "postgresql"])
def test_a_fleet_moves_between_the_databases(
    source: str, fleet: DataFolder, postgres: Postgres, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = postgres.new_database()
    file, new = tmp_path / "moved.backup", tmp_path / "new"
    if source == "sqlite":
        assert main(["backup", str(file), "--data", str(fleet.root)]) == 0
        assert restore(file, new, "--store", url) == 0
        assert not DataFolder(new).database.exists()
        assert restore(file, tmp_path / "second", "--store", url) == 1
        assert "there is data already (the database is not empty: " in said(capsys)
    else:
        asyncio.run(fill(url))
        assert main(["backup", str(file), "--data", str(tmp_path / "none"), "--store", url]) == 0
        assert restore(file, new) == 0
        assert rows(new, "SELECT name FROM nodes") == [("attic",)]
    postgres.drop(url)


def test_a_running_fleet_is_backed_up_and_not_restored_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_fleet(tmp_path / "data", alive=True)
    file = tmp_path / "f.backup"
    with lock_file(folder.lock):
        assert main(["backup", str(file), "--data", str(folder.root)]) == 0
        before = texts(folder.root)
        capsys.readouterr()
        assert restore(file, folder.root) == 1
        assert f"the fleet in {folder.root} is running (pid {os.getpid()}): stop it first" in said(capsys)
        assert texts(folder.root) == before
        other = f"sqlite:///{make_fleet(tmp_path / 'old').database}"
        assert main(["backup", str(tmp_path / "g"), "--data", str(folder.root), "--store", other]) == 1
        assert "its controller does not use the database" in said(capsys)


def test_existing_data_is_refused_with_what_to_do(
    sealed: Path, fleet: DataFolder, passphrase: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = texts(fleet.root)
    capsys.readouterr()
    assert restore(sealed, fleet.root, "--passphrase-file", passphrase) == 1
    error = said(capsys)
    assert "there is data already (the database is not empty: api_keys has 1 row)" in error
    assert f"`mv {fleet.root} {fleet.root}.old`" in error
    assert texts(fleet.root) == before
    assert rows(fleet.root, "SELECT count(*) FROM nodes") == [(1,)]

    new = tmp_path / "new"
    (new / "secrets").mkdir(parents=True)
    (new / "secrets/ca.key").write_text("another CA")
    (new / "ports.json").write_text("{}")
    assert restore(sealed, new, "--passphrase-file", passphrase) == 1
    assert "other files are in their places: secrets/ca.key" in said(capsys)
    assert texts(new) == {"secrets/ca.key": "another CA", "ports.json": "{}"}
    (new / "secrets/ca.key").write_text(SECRETS["secrets/ca.key"])
    assert restore(sealed, new, "--passphrase-file", passphrase) == 0, "the same content is not in the way"
    assert texts(new) == SECRETS | PLAIN | {"ports.json": "{}"}


def test_the_worker_of_another_machine_is_not_restored(
    sealed: Path, passphrase: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restoring, "machine_id", lambda: "another machine")
    new = tmp_path / "new"
    assert restore(sealed, new, "--passphrase-file", passphrase) == 0
    assert texts(new) == {name: text for name, text in (SECRETS | PLAIN).items() if not parts.is_of_worker(name)}


@pytest.mark.parametrize("fault", ["damaged", "cut", "foreign", "wrong passphrase", "no passphrase", "newer", "schema"])
def test_a_backup_that_cannot_be_used_changes_nothing(
    fault: str,
    sealed: Path,
    passphrase: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = sealed.read_bytes()
    words = ["--passphrase-file", passphrase]
    expected = "damaged or incomplete"
    if fault == "damaged":
        sealed.write_bytes(whole[:-100] + bytes([whole[-100] ^ 1]) + whole[-99:])
    elif fault == "cut":
        sealed.write_bytes(whole[:-1])
    elif fault == "foreign":
        sealed.write_bytes(b"PK\x03\x04" + whole)
        expected = "is not a backup of Corral"
    elif fault == "wrong passphrase":
        Path(passphrase).write_text("five words or even more")
        expected = "the passphrase is not the one of this backup"
    elif fault == "no passphrase":
        words = []
        expected = "sealed with a passphrase: give it with --passphrase-file FILE or CORRAL_BACKUP_PASSPHRASE"
    elif fault == "newer":
        monkeypatch.setattr(restoring, "__version__", "0.0.9")
        expected = "upgrade corral first"
    elif fault == "schema":
        sealed.write_bytes(whole.replace(b'"schema":"00', b'"schema":"99', 1))
        expected = "newer than this corral"
    new = tmp_path / "new"
    capsys.readouterr()
    assert restore(sealed, new, *words) == 1
    assert expected in said(capsys)
    assert not new.exists()
    new.mkdir()
    (new / "kept").write_text("x")
    assert restore(sealed, new, *words) == 1
    assert texts(new) == {"kept": "x"}


STEPS = ["staging", "mark", "first file", "all files", "loaded"]


@pytest.mark.parametrize("step", STEPS)
def test_a_restore_that_was_interrupted_is_completed_by_the_same_command(
    step: str, sealed: Path, passphrase: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """kill -9 at this step, in a process of its own."""
    new = tmp_path / "new"
    words = ["restore", str(sealed), "--data", str(new), "--passphrase-file", passphrase]
    ended = subprocess.run([sys.executable, "-c", KILLED, step, *words], capture_output=True, text=True, timeout=60)
    assert ended.returncode == -9, ended.stderr
    if step != "staging":
        assert main(["up", "--data", str(new)]) == 1
        assert "a restore into" in said(capsys)
        assert main(["backup", str(tmp_path / "b"), "--data", str(new)]) == 1
        assert "was interrupted: run `corral restore FILE" in said(capsys)
    assert main(words) == 0
    assert texts(new) == SECRETS | PLAIN
    assert rows(new, "SELECT name FROM nodes") == [("attic",)]
    assert not DataFolder(new).restore_mark.exists()


KILLED = """
import os, signal, sys
from corral.cli.backup import restore
from corral.cli.main import main

step, words = sys.argv[1], sys.argv[2:]
die = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)

def dying_after(call, times=1):
    left = [times]
    def wrapped(*given, **named):
        result = call(*given, **named)
        left[0] -= 1
        if left[0] == 0:
            die()
        return result
    return wrapped

if step == "staging":
    restore._place_files = die
elif step == "mark":
    restore.write_atomically = dying_after(restore.write_atomically)
elif step == "first file":
    rename = os.replace
    def replace(source, target):
        rename(source, target)
        if "secrets" in str(target):
            die()
    os.replace = replace
elif step == "all files":
    restore._place_files = dying_after(restore._place_files)
elif step == "loaded":
    restore.asyncio.run = dying_after(restore.asyncio.run, times=3)  # twice to look, once to load
sys.exit(main(words))
"""


def test_another_backup_after_an_interrupted_one_leaves_nothing_of_the_first(
    sealed: Path, unsealed: Path, passphrase: str, tmp_path: Path
) -> None:
    new = tmp_path / "new"
    words = ["restore", str(sealed), "--data", str(new), "--passphrase-file", passphrase]
    ended = subprocess.run([sys.executable, "-c", KILLED, "all files", *words], capture_output=True, timeout=60)
    assert ended.returncode == -9
    assert restore(unsealed, new) == 0
    assert texts(new).keys() == PLAIN.keys()


def test_not_enough_space(
    sealed: Path,
    fleet: DataFolder,
    passphrase: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    new = tmp_path / "new"
    monkeypatch.setattr(restoring, "_SPARE_BYTES", 1 << 60)
    capsys.readouterr()
    assert restore(sealed, new, "--passphrase-file", passphrase) == 1
    assert "free some space" in said(capsys)
    assert not new.exists()

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(commands, "write_backup", full)
    before = sealed.read_bytes()
    assert main(["backup", str(sealed), "--data", str(fleet.root), "--overwrite"]) == 1
    assert "No space left on device: free some space" in said(capsys)
    assert sealed.read_bytes() == before, "the earlier backup stays"
    assert {path.name for path in sealed.parent.iterdir()} == {"data", "passphrase", sealed.name}


def test_where_a_backup_cannot_go(
    fleet: DataFolder, passphrase: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "there"
    file.write_text("mine")
    for target, words, expected in (
        (file, [], "exists: give another name, or --overwrite"),
        (tmp_path, [], "is a folder"),
        (tmp_path / "none" / "b", [], "there is no folder"),
        (tmp_path / "b", ["--passphrase-file", str(tmp_path / "none")], "cannot be read"),
        (tmp_path / "b", ["--passphrase-file", str(file)], "too short"),
    ):
        assert main(["backup", str(target), "--data", str(fleet.root), *words]) == 1
        assert expected in said(capsys)
    assert main(["backup", str(tmp_path / "b"), "--data", str(fleet.root), "--with-secrets"]) == 2
    assert "--passphrase-file FILE or CORRAL_BACKUP_PASSPHRASE" in " ".join(capsys.readouterr().err.split())
    assert main(["backup", str(tmp_path / "b"), "--data", str(tmp_path / "no-fleet")]) == 1
    assert "there is no database" in said(capsys)
    assert not (tmp_path / "b").exists()
    assert file.read_text() == "mine"
    assert main(["backup", str(file), "--data", str(fleet.root), "--overwrite"]) == 0
    assert file.read_bytes().startswith(b"corral backup\n")
    assert file.stat().st_mode & 0o777 == 0o600


def test_the_passphrase_from_the_environment(
    fleet: DataFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CORRAL_BACKUP_PASSPHRASE", PASSPHRASE)
    file = tmp_path / "b"
    assert main(["backup", str(file), "--data", str(fleet.root), "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert (made["has_secrets"], made["rows"]["nodes"]) == (True, 1)
    assert made["size_bytes"] == file.stat().st_size
    assert restore(file, tmp_path / "new") == 0
    assert texts(tmp_path / "new") == SECRETS | PLAIN


def test_what_a_killed_backup_left_is_removed_and_two_at_once_are_refused(
    fleet: DataFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    left = fleet.root / ".backup"
    left.mkdir()
    (left / "store.db").write_text("half")
    folder = DataFolder(fleet.root)
    with commands._working_folder(folder):
        assert main(["backup", str(tmp_path / "b"), "--data", str(fleet.root)]) == 1
        assert "another backup" in said(capsys)
        assert list(left.iterdir()) == []
    assert not left.exists()
    assert main(["backup", str(tmp_path / "b"), "--data", str(fleet.root)]) == 0
    assert not left.exists()


@pytest.fixture(autouse=True)
def _umask() -> Iterator[None]:
    """Of most systems: new files are readable by all unless they are made private."""
    before = os.umask(0o022)
    yield
    os.umask(before)
