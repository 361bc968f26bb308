"""Identity on disk: stored before it is used, never lost, never shared by two workers."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path

import pytest
from msgspec.structs import replace

from corral.worker.agent.join.identity import IdentityFile, default_name, hold_folder
from corral.worker.status import FatalError


def test_the_enrolment_is_on_disk_before_anybody_can_send_it(tmp_path: Path) -> None:
    made = IdentityFile.open(tmp_path, name="w1")
    assert not made.found
    stored = json.loads((tmp_path / "identity.json").read_bytes())
    assert stored["enrolment"] == made.current.enrolment
    assert stored["enrolment"].startswith("ce_")
    assert stored["name"] == "w1"
    assert stat.S_IMODE((tmp_path / "identity.json").stat().st_mode) == 0o600


def test_a_restart_is_the_same_node(tmp_path: Path) -> None:
    first = IdentityFile.open(tmp_path, name="")
    first.store(replace(first.current, node_id="n-1", node_token="cn_x"))
    again = IdentityFile.open(tmp_path, name="")
    assert again.found
    assert again.current == first.current


def test_the_name_survives_a_renamed_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "before")
    assert IdentityFile.open(tmp_path, name="").current.name == "before"
    monkeypatch.setattr("socket.gethostname", lambda: "after")
    assert IdentityFile.open(tmp_path, name="").current.name == "before"


@pytest.mark.parametrize("step", ["os.fsync", "os.replace"])
def test_a_write_that_dies_leaves_the_old_identity_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    known = IdentityFile.open(tmp_path, name="w1")
    before = (tmp_path / "identity.json").read_bytes()

    def die(*_: object) -> None:
        raise KeyboardInterrupt  # what a test can have of a kill: nothing after this runs

    with monkeypatch.context() as patched:
        patched.setattr(step, die)
        with pytest.raises(KeyboardInterrupt):
            known.store(replace(known.current, node_id="n-1"))
    assert (tmp_path / "identity.json").read_bytes() == before
    assert IdentityFile.open(tmp_path, name="").current.enrolment == known.current.enrolment


def test_leftovers_of_a_killed_writer_are_removed(tmp_path: Path) -> None:
    (tmp_path / ".identity.json.abc").write_text("half")
    IdentityFile.open(tmp_path, name="w1")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["identity.json"]


def test_a_full_disk_is_told_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(FatalError, match=r"^cannot write .*identity.json: No space left on device; free disk space"):
        IdentityFile.open(tmp_path, name="w1")


@pytest.mark.parametrize("content", [b"", b"{", b'{"name":1}', b"[]", b"\xff"])
def test_a_damaged_identity_is_not_replaced(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "identity.json").write_bytes(content)
    with pytest.raises(FatalError, match="is damaged"):
        IdentityFile.open(tmp_path, name="w1")
    assert (tmp_path / "identity.json").read_bytes() == content


def test_unknown_fields_of_a_newer_version_are_ignored(tmp_path: Path) -> None:
    (tmp_path / "identity.json").write_text('{"enrolment":"ce_a","name":"w1","new":[1]}')
    assert IdentityFile.open(tmp_path, name="").current.name == "w1"


def test_a_node_cannot_be_renamed_by_its_worker(tmp_path: Path) -> None:
    known = IdentityFile.open(tmp_path, name="w1")
    assert IdentityFile.open(tmp_path, name="w2").current.name == "w2"  # nobody knows it yet
    known.store(replace(known.current, node_id="n-1"))
    with pytest.raises(FatalError, match="belongs to the node 'w1', not 'w2'"):
        IdentityFile.open(tmp_path, name="w2")


def test_a_deleted_node_comes_back_as_somebody_new(tmp_path: Path) -> None:
    known = IdentityFile.open(tmp_path, name="w1")
    known.store(replace(known.current, node_id="n-1", node_token="cn_x", controller="https://c", ca="PEM"))
    new = known.current.renewed()
    assert (new.node_id, new.node_token) == ("", "")
    assert (new.name, new.controller, new.ca) == ("w1", "https://c", "PEM")
    assert new.enrolment != known.current.enrolment


def test_the_controller_is_remembered(tmp_path: Path) -> None:
    known = IdentityFile.open(tmp_path, name="w1")
    with pytest.raises(FatalError, match=r"has not joined a fleet.*corral join URL --token TOKEN"):
        known.choose_controller("")
    assert known.choose_controller("https://a") == "https://a"
    assert IdentityFile.open(tmp_path, name="").choose_controller("") == "https://a"
    assert known.choose_controller("https://b") == "https://b"


def test_a_second_worker_is_kept_out(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    with (
        hold_folder(folder),
        pytest.raises(FatalError, match=rf"another worker \(pid {os.getpid()}\) uses .*own --data folder"),
        hold_folder(folder),
    ):
        pytest.fail("two workers in one folder")
    with hold_folder(folder):
        assert (folder / "lock").read_text() == f"{os.getpid()}\n"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_folder_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(FatalError, match=r"cannot use the data folder .*file/data"),
        hold_folder(tmp_path / "file/data"),
    ):
        pytest.fail("there is no such folder")


@pytest.mark.parametrize(("host", "name"), [("box", "box"), ("", "node-7"), ("  ", "node-7"), ("x" * 300, "x" * 255)])
def test_default_name(host: str, name: str) -> None:
    assert default_name(host, 7) == name
