"""`corral migrate-store` around the store's own copying: who must be stopped, what is said."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from corral.cli.common.data_folder import DataFolder, lock_file
from corral.cli.main import main
from corral.store import open_store
from corral.store.tables import controllers


def make_store(folder: DataFolder, *, controller_alive: bool) -> None:
    async def make() -> None:
        folder.controller.mkdir(parents=True)
        async with open_store(f"sqlite:///{folder.database}") as store, store.write() as tx:
            if controller_alive:
                await controllers.seen(tx, "c1", host="attic", version="0.1.0")

    asyncio.run(make())


def migrate(folder: DataFolder, target: Path, *more: str) -> int:
    return main(["migrate-store", "--data", str(folder.root), "--to", f"sqlite:///{target}", *more])


def test_everything_is_copied_into_an_empty_database_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = DataFolder(tmp_path / "data")
    make_store(folder, controller_alive=False)
    assert migrate(folder, tmp_path / "new.db", "--json") == 0
    assert {"table": "nodes", "rows": 0} in json.loads(capsys.readouterr().out)
    before = (tmp_path / "data" / "controller" / "corral.db").read_bytes()
    assert migrate(folder, tmp_path / "new2.db") == 0
    assert "copied and verified" in capsys.readouterr().out
    assert (tmp_path / "data" / "controller" / "corral.db").read_bytes() == before


def test_a_running_fleet_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = DataFolder(tmp_path / "data")
    make_store(folder, controller_alive=False)
    with lock_file(folder.lock):
        assert migrate(folder, tmp_path / "new.db") == 1
    assert "stop it first" in capsys.readouterr().err
    assert not (tmp_path / "new.db").exists()


def test_a_controller_elsewhere_that_uses_the_database_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = DataFolder(tmp_path / "data")
    make_store(folder, controller_alive=True)
    assert migrate(folder, tmp_path / "new.db") == 1
    assert capsys.readouterr().err.startswith("corral: a controller on attic used this database")


def test_nothing_to_copy_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert migrate(DataFolder(tmp_path / "none"), tmp_path / "new.db") == 1
    assert "there is no database" in capsys.readouterr().err
    assert main(["migrate-store"]) == 2
