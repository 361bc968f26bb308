"""The machine's package manager, as far as a script of the same name can stand for it: what it is told, how often, and
what becomes of its failures."""

from __future__ import annotations

import asyncio
import shlex
from pathlib import Path

import pytest

from corral.kit.errors import Failed
from corral.worker.system.packages import PackageManager
from tests.support.apt import scripted_apt
from tests.support.waiting import until


def manager(folder: Path, script: str, **more: float) -> PackageManager:
    environment = scripted_apt(folder, script)
    return PackageManager(env=environment, is_root=True, debian_version=folder / "bin" / "apt-get", **more)  # type: ignore[arg-type]


def calls(folder: Path) -> list[list[str]]:
    """What it was told, without options."""
    lines = [shlex.split(line) for line in (folder / "calls").read_text().splitlines()]
    return [[word for word in line if not word.startswith("-") or word == "--download-only"] for line in lines]


async def test_packages_are_fetched_first_then_unpacked_and_nothing_is_asked(tmp_path: Path) -> None:
    await manager(tmp_path, 'echo "$DEBIAN_FRONTEND" >>front; if read -r _; then exit 9; fi').install(
        ["liba1", "libb2"]
    )
    assert calls(tmp_path) == [["install", "--download-only", "liba1", "libb2"], ["install", "liba1", "libb2"]]
    assert (tmp_path / "front").read_text().split() == ["noninteractive"] * 2
    assert "-y" in (tmp_path / "calls").read_text().split()


async def test_lists_that_are_old_or_absent_are_read_anew(tmp_path: Path) -> None:
    script = 'case "$1" in update) touch lists;; *) [ -e lists ] || { echo "E: no such package"; exit 100; };; esac'
    await manager(tmp_path, script).install(["liba1"])
    assert [call[0] for call in calls(tmp_path)] == ["install", "update", "install", "install"]


async def test_another_package_manager_is_waited_for(tmp_path: Path) -> None:
    script = '[ -e free ] || { touch free; echo "E: Could not get lock /var/lib/apt/lists/lock"; exit 100; }'
    await manager(tmp_path, script).install(["liba1"])
    assert [call[0] for call in calls(tmp_path)] == ["install", "install", "install"], "no update: nothing was wrong"


async def test_what_it_said_last_is_told(tmp_path: Path) -> None:
    with pytest.raises(Failed, match=r"apt-get install failed \(100\): E: Unable to locate package liba1"):
        await manager(tmp_path, '[ "$1" = update ] || { echo "E: Unable to locate package liba1"; exit 100; }').install(
            ["liba1"]
        )


async def test_one_that_hangs_ends(tmp_path: Path) -> None:
    with pytest.raises(Failed, match=r"(took longer than|did not end within) "):
        await manager(tmp_path, "exec sleep 600", timeout_s=0.5).install(["liba1"])


async def test_given_up_while_it_unpacks_it_is_let_finish(tmp_path: Path) -> None:
    script = 'case "$2" in --download-only) ;; *) touch begun; until [ -e go ]; do :; done; touch unpacked;; esac'
    installing = asyncio.create_task(manager(tmp_path, script).install(["liba1"]))
    await until((tmp_path / "begun").exists)
    installing.cancel()
    (tmp_path / "go").touch()
    with pytest.raises(asyncio.CancelledError):
        await installing
    assert (tmp_path / "unpacked").exists()
