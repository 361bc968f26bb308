"""The default data folder, and garbage collections after the start."""

from __future__ import annotations

import asyncio
import gc
import os
import pwd
from pathlib import Path
from types import SimpleNamespace

import pytest

from corral.cli.common.data_folder import default_data
from corral.cli.up.settings import UpSettings
from corral.controller.settings import ControllerSettings
from corral.kit import process
from corral.kit.process import HOME_DATA, freeze_gc, freeze_gc_after_start, paused_gc, resolve_data
from corral.worker.settings import WorkerSettings
from tests.support.waiting import until


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Root's own, and nothing there yet."""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(process, "ROOT_DATA", tmp_path / "var")
    monkeypatch.setattr(pwd, "getpwuid", lambda _: SimpleNamespace(pw_dir=str(tmp_path / "home")))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_roots_data_is_not_below_its_home(home: Path, tmp_path: Path) -> None:
    assert resolve_data(HOME_DATA) == tmp_path / "var"
    assert WorkerSettings().node.data == tmp_path / "var" / "worker"
    assert ControllerSettings().data == tmp_path / "var" / "controller"
    assert UpSettings().data == default_data({}) == tmp_path / "var"


def test_a_folder_that_is_in_use_stays(home: Path) -> None:
    worker = home / ".local/share/corral/worker"
    worker.mkdir(parents=True)
    assert WorkerSettings().node.data == worker
    assert UpSettings().data == home / ".local/share/corral"


def test_a_folder_that_somebody_gave(home: Path, tmp_path: Path) -> None:
    given = home / ".local/share/corral"
    assert UpSettings(data=given).data == given
    assert default_data({"CORRAL_DATA": str(given)}) == given
    assert default_data({"CORRAL_DATA": "~/mine"}) == home / "mine"


def test_others_keep_theirs_at_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert WorkerSettings().node.data == home / ".local/share/corral/worker"


def test_a_home_that_was_chosen(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "other"))
    assert UpSettings().data == tmp_path / "other/.local/share/corral"


def test_a_folder_of_the_service_is_left_to_it(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    var = tmp_path / "var"
    var.mkdir()
    if os.stat(var).st_uid:  # the tests are not root's: neither is the folder
        assert UpSettings().data == home / ".local/share/corral"
        return
    assert UpSettings().data == var
    os.chown(var, 1000, 1000)
    assert UpSettings().data == home / ".local/share/corral"


def test_later_collections_skip_the_objects_of_the_start() -> None:
    kept = [[number] for number in range(100)]
    assert any(found is kept for found in gc.get_objects())
    freeze_gc()
    assert not any(found is kept for found in gc.get_objects())


def test_collections_pause_during_the_start_only() -> None:
    with paused_gc():
        assert not gc.isenabled()
        freeze_gc()
        assert gc.isenabled()
    with pytest.raises(KeyError), paused_gc():
        raise KeyError
    assert gc.isenabled()


async def test_collections_are_frozen_after_the_start() -> None:
    before = gc.get_freeze_count()
    freeze_gc_after_start(asyncio.get_running_loop(), 0.01)
    assert gc.get_freeze_count() == before
    await until(lambda: gc.get_freeze_count() > before, "a frozen heap")
