"""Backends that need a library of the system, on a machine that lacks it. The linker is the real one; the library is
some other one's copy under a name of its own, which is there once a folder of it is in the linker's path."""

from __future__ import annotations

import shutil
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from tests.support.apt import scripted_apt
from tests.support.nats import NatsServer, nats_server
from tests.support.ordering import OrderedFleet, digest, ordered_worker, tiny_order
from tests.support.waiting import until

__all__ = ["nats_server"]

LIBRARY = "libcorral-test.so.1"
NEEDS = {"libraries": [LIBRARY], "debian": ["libcorral-test1"]}
LACKS = f"tiny needs {LIBRARY}, which this machine lacks"


@pytest.fixture
def linked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which the linker looks."""
    folder = tmp_path / "lib"
    folder.mkdir()
    monkeypatch.setenv("LD_LIBRARY_PATH", str(folder))
    return folder


def some_library() -> Path:
    return next(path for line in Path("/proc/self/maps").read_text().splitlines()
                if (path := Path(line.split()[-1])).name.startswith("libz.so"))  # fmt: skip


def needing(letter: str = "a", want: str = "") -> dict[str, Any]:
    order = tiny_order(letter, want)
    return order | {"manifest": order["manifest"] | {"needs": NEEDS}}


def declining_worker(server: NatsServer, folder: Path) -> AbstractAsyncContextManager[OrderedFleet]:
    """One that installs no packages by itself."""
    return ordered_worker(server, folder, install_system_packages="false", heartbeat_interval="1s")


def report(fleet: OrderedFleet, op: str) -> dict[str, Any]:
    orders = fleet.last_beat("orders").get("orders", ())
    return next((each for each in orders if each["op_id"] == op), {})


async def test_an_install_is_refused_before_a_byte_is_fetched_until_the_library_is_there(
    nats_server: NatsServer, tmp_path: Path, linked: Path
) -> None:
    async with declining_worker(nats_server, tmp_path) as fleet:
        result = await fleet.order("install", "op-1", needing())
        assert (result["success"], result["code"], result["permanent"]) == (False, "missing_libraries", True)
        assert result["error"].startswith(LACKS)
        assert result["error"].endswith("apt-get install libcorral-test1")
        assert (result["missing"], result["phase"]) == ([LIBRARY], "resolving")
        assert await fleet.backends() == {}
        await until(lambda: report(fleet, "op-1"))
        assert "cured" not in report(fleet, "op-1")
        shutil.copy(some_library(), linked / LIBRARY)
        await until(lambda: report(fleet, "op-1").get("cured"))
        assert (await fleet.order("install", "op-1", needing(), attempt=2))["success"]
        await until(lambda: [row.get("problem") for row in fleet.last_beat("inventory").get("inventory", ())] == [None])


async def test_as_root_on_debian_the_worker_installs_the_packages_itself(
    nats_server: NatsServer, tmp_path: Path, linked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = (
        f'case "$2" in --download-only) until [ -e go ]; do :; done;; *) cp {some_library()} {linked / LIBRARY};; esac'
    )
    monkeypatch.setenv("PATH", scripted_apt(tmp_path / "apt", script)["PATH"])
    monkeypatch.setattr("os.geteuid", lambda: 0)
    async with ordered_worker(nats_server, tmp_path) as fleet:
        body = needing() | {"op_id": "op-1", "attempt": 1, "accept": True}
        assert (await fleet.ask("backend.install", body))["accepted"]

        def shown() -> list[str]:
            return [event.get("file_name", "") for event in fleet.told("backend.install.op-1.progress")]

        await until(lambda: "apt-get install libcorral-test1" in shown())
        (tmp_path / "apt" / "go").touch()
        assert (await fleet.result("backend.install", "op-1"))["success"]
        assert "libcorral-test1" in (tmp_path / "apt" / "calls").read_text()


async def test_a_package_manager_that_fails_is_told_and_tried_again(
    nats_server: NatsServer, tmp_path: Path, linked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", scripted_apt(tmp_path / "apt", "echo no such mirror; exit 100")["PATH"])
    monkeypatch.setattr("os.geteuid", lambda: 0)
    async with ordered_worker(nats_server, tmp_path) as fleet:
        result = await fleet.order("install", "op-1", needing())
        assert (result["success"], result.get("permanent", False)) == (False, False)
        assert result["error"].startswith(LACKS)
        assert "no such mirror" in result["error"]
        assert result["error"].endswith("→ apt-get install libcorral-test1")


async def test_an_installed_backend_whose_library_is_gone_is_reported_and_does_not_start(
    nats_server: NatsServer, tmp_path: Path, linked: Path
) -> None:
    shutil.copy(some_library(), linked / LIBRARY)
    async with declining_worker(nats_server, tmp_path) as fleet:
        assert (await fleet.order("install", "op-1", needing()))["success"]
        (linked / LIBRARY).unlink()
        body = {"process_id": "p1", "model": "m", "replica": 0, "backend": "tiny", "digest": digest("a")}
        refused = await fleet.ask("replica.start", body)
        assert refused["error"].startswith(LACKS)
        shutil.copy(some_library(), linked / LIBRARY)
        assert (await fleet.ask("replica.start", body))["success"]


async def test_the_inventory_names_the_problem_of_what_is_installed(
    nats_server: NatsServer, tmp_path: Path, linked: Path
) -> None:
    shutil.copy(some_library(), linked / LIBRARY)
    async with declining_worker(nats_server, tmp_path) as fleet:
        assert (await fleet.order("install", "op-1", needing()))["success"]
    (tmp_path / "w" / "identity.json").unlink()  # another controller script: it must join anew
    (linked / LIBRARY).unlink()
    async with declining_worker(nats_server, tmp_path) as fleet:

        def problem() -> str:
            rows = fleet.last_beat("inventory").get("inventory", ())
            return next((row.get("problem", "") for row in rows), "")

        await until(lambda: problem().startswith(LACKS))
        shutil.copy(some_library(), linked / LIBRARY)
        await until(lambda: not problem())


async def test_a_process_that_cannot_open_a_library_is_told_with_the_command(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    """Of a build that declares nothing: LocalAI's, or one that was installed before it did."""
    order = tiny_order("a")
    (file,) = order["sources"][0]["files"]
    file["text"] = "import ctypes\nctypes.CDLL('libgomp.so.12345')\n"
    async with ordered_worker(nats_server, tmp_path) as fleet:
        assert (await fleet.order("install", "op-1", order))["success"]
        body = {"process_id": "p1", "model": "m", "replica": 0, "backend": "tiny", "digest": digest("a")}
        refused = await fleet.ask("replica.start", body)
        first, _, rest = refused["error"].partition("\n")
        assert first == (
            "tiny needs libgomp.so.12345, which this machine lacks → install the package that has libgomp.so.12345"
        )
        assert "ended with code 1 while it started" in rest
