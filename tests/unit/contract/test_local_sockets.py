"""The path of the unix socket of an ingress, which worker and gateway compute alike, and the folder it may be in."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from corral.contract.local_sockets import check_socket_folder, local_socket

NODE = "0f8fad5b-d9cb-469f-a165-70867728950e"
FOLDER = Path("/run/corral")


def test_the_name_has_node_and_port() -> None:
    assert local_socket(FOLDER, NODE, 50050) == f"/run/corral/{NODE}-50050.sock"
    assert local_socket(FOLDER, NODE, 50051) != local_socket(FOLDER, NODE, 50050)
    assert local_socket(Path("here"), "n1", 1) == str(Path.cwd() / "here" / "n1-1.sock")


@pytest.mark.parametrize("node_id", ["", "..", "../etc", "a/b", "a\0b", ".hidden", "-rf", "x" * 37, "ä", "a\n"])
def test_an_id_that_cannot_name_a_file_has_no_socket(node_id: str) -> None:
    assert local_socket(FOLDER, node_id, 50050) == ""


def test_before_the_ingress_has_a_port_there_is_no_socket() -> None:
    assert local_socket(FOLDER, NODE, 0) == ""


def test_a_folder_that_does_not_exist_can_be_used_if_its_path_is_short() -> None:
    assert check_socket_folder(Path("/nowhere/s")) is None
    assert "too long" in str(check_socket_folder(Path("/" + "x" * 60)))
    assert check_socket_folder(Path("/" + "x" * 51)) is None


def test_folders_that_other_users_could_use_are_refused(short_folder: Path) -> None:
    private = short_folder / "s"
    private.mkdir(mode=0o700)
    assert check_socket_folder(private) is None
    for mode in (0o755, 0o770, 0o1777):
        private.chmod(mode)
        assert "chmod 700" in str(check_socket_folder(private))
    private.chmod(0o700)
    (private / "file").write_text("")
    assert "is not a folder" in str(check_socket_folder(private / "file"))
    assert "cannot be used" in str(check_socket_folder(private / "file" / "below"))


def test_a_folder_of_another_user_is_refused(short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short_folder.chmod(0o700)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert "another user" in str(check_socket_folder(short_folder))
