"""The id a controller keeps in its data folder, and which controllers people are shown."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path

import pytest

from corral.contract.admin import ControllerView
from corral.controller.api.overview import without_replaced
from corral.controller.runtime.presence import hold_instance_id


def test_a_restart_keeps_the_id(tmp_path: Path) -> None:
    with hold_instance_id(tmp_path) as first:
        pass
    with hold_instance_id(tmp_path) as second:
        assert second == first


def test_a_second_process_on_the_folder_has_an_id_of_its_own(tmp_path: Path) -> None:
    with hold_instance_id(tmp_path) as first, hold_instance_id(tmp_path) as second:
        assert second != first
    with hold_instance_id(tmp_path) as third:
        assert third == first


def test_a_copy_of_the_folder_on_another_host_has_an_id_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    with hold_instance_id(tmp_path / "here") as first:
        pass
    shutil.copytree(tmp_path / "here", tmp_path / "there")
    monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
    with hold_instance_id(tmp_path / "there") as second:
        assert second != first


@pytest.mark.parametrize("text", ["", "nonsense", "nonsense {host}", "\xff\x00 {host}"])
def test_a_file_that_cannot_be_read_is_written_anew(tmp_path: Path, text: str) -> None:
    (tmp_path / "instance-id").write_text(text.format(host=socket.gethostname()), encoding="latin-1")
    with hold_instance_id(tmp_path) as first:
        pass
    with hold_instance_id(tmp_path) as second:
        assert (second, len(first)) == (first, 36)


def test_without_a_folder_that_can_be_written_there_is_an_id_too(tmp_path: Path) -> None:
    with hold_instance_id(tmp_path / "nowhere") as given:
        assert len(given) == 36


def view(name: str, host: str, started: str, seen: str, *, live: bool) -> ControllerView:
    return ControllerView(id=name, host=host, started_at=f"{started}.000Z", seen_at=f"{seen}.000Z", live=live)


def test_one_that_was_followed_on_its_host_is_not_shown() -> None:
    """Rows that earlier versions left behind at every crash: their id was another after each start."""
    crashed = view("a", "barn", "2026-05-01T10:00:00", "2026-05-01T12:00:00", live=False)
    now = view("b", "barn", "2026-05-01T12:00:01", "2026-05-04T12:00:00", live=True)
    assert without_replaced([crashed, now]) == (now,)


def test_one_that_is_missed_is_shown() -> None:
    twin = view("a", "barn", "2026-05-01T10:00:00", "2026-05-04T11:00:00", live=False)
    other_host = view("b", "shed", "2026-05-01T10:00:00", "2026-05-01T12:00:00", live=False)
    live = view("c", "barn", "2026-05-01T10:00:00", "2026-05-04T12:00:00", live=True)
    late = view("d", "attic", "2026-05-04T10:00:00", "2026-05-04T12:00:00", live=True)
    assert without_replaced([twin, other_host, live, late]) == (twin, other_host, live, late)
