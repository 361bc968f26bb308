"""A Corral controller installs, upgrades and deletes on a LocalAI worker, in the contract's words and by its rules."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.compat.localai_backends import Build
from tests.compat.localai_worker import LocalAIWorker
from tests.support.backend_images import gallery_of
from tests.support.cluster import Cluster
from tests.support.fleet import PATIENT
from tests.support.ordering import mock_copy
from tests.support.waiting import until

SHARED = "the-shared-registration-token"


class Yard:
    """A controller with a gallery, and the nodes that come and go."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.source = mock_copy(folder / "mock")
        self.cluster = Cluster(
            folder,
            f"sqlite:///{folder}/corral.db",
            members=1,
            CORRAL_COMPAT_LOCALAI="true",
            CORRAL_REGISTRATION_TOKEN=SHARED,
            CORRAL_BACKEND_INSTALL_TIMEOUT="4s",
            CORRAL_BACKEND_UPGRADE_TIMEOUT="4s",
            **(PATIENT | self.publish("1") | {"CORRAL_GALLERY_FRESH": "1ms"}),
        )

    def publish(self, version: str) -> dict[str, str]:
        """`engine` chooses among builds that share its name, as LocalAI's do; `solo` is one build for everybody. In
        front of that gallery stands one with an entry of its own."""
        uri = str(self.source)
        capabilities = {"default": "cpu-engine", "nvidia-cuda-12": "cuda12-engine"}
        private = self.folder / "galleries" / "private.json"
        private.parent.mkdir(exist_ok=True)
        private.write_text(json.dumps([{"name": "private-engine", "uri": uri, "version": version}]))
        env = gallery_of(
            self.folder / "galleries",
            {"name": "engine", "alias": "engine", "capabilities": capabilities},
            {"name": "cpu-engine", "alias": "engine", "uri": uri, "version": version},
            {"name": "cuda12-engine", "alias": "engine", "uri": uri, "version": version},
            {"name": "solo", "uri": uri, "version": version},
        )
        galleries = [{"name": "private", "url": f"file://{private}"}, *json.loads(env["CORRAL_GALLERIES"])]
        return env | {"CORRAL_GALLERIES": json.dumps(galleries)}

    @property
    def galleries(self) -> str:
        """The gallery that has `engine` and `solo`, as it travels: JSON inside JSON."""
        told: list[dict[str, str]] = json.loads(self.cluster.env["CORRAL_GALLERIES"])
        return json.dumps(told[1:], separators=(",", ":"))

    async def api(self, method: str, path: str, body: object = None) -> Any:
        answer = await asyncio.to_thread(self.cluster.api, self.cluster.members[0], method, path, body)
        assert answer.status < 300, (path, answer.status, answer.body)
        return answer.json() if answer.body else None

    async def ask(self, kind: str, backend: str, node: str) -> str:
        body = {"backend": backend}
        asked = {"kind": kind, "backend": backend, "node": node} if kind == "delete" else body
        path = "/api/operations" if kind == "delete" else f"/api/nodes/{node}/backends/{kind}"
        return str((await self.api("POST", path, asked))["jobID"])

    async def operation(self, job: str) -> dict[str, Any]:
        found: dict[str, Any] = await self.api("GET", f"/api/operations/{job}")
        return found

    async def row(self, job: str, holds: Callable[[dict[str, Any]], bool], what: str, node: str = "") -> dict[str, Any]:
        """The node's row once it is so."""

        async def look() -> dict[str, Any]:
            view = await self.operation(job)
            rows: list[dict[str, Any]] = [row for row in view["nodes"] if node in ("", row["node_name"])]
            assert rows
            assert holds(rows[0]), rows[0]
            return rows[0]

        return await until(look, what)

    async def done(self, job: str) -> dict[str, Any]:
        async def look() -> bool:
            view = await self.operation(job)
            assert view["state"] == "done", view
            return True

        await until(look, f"end of {job}", 60)
        return await self.operation(job)

    async def backends(self, node: str) -> dict[str, dict[str, Any]]:
        return {row["name"]: row for row in await self.api("GET", f"/api/nodes/{node}/backends")}

    @contextlib.asynccontextmanager
    async def worker(self, name: str, *, upgrades: bool = True) -> AsyncIterator[LocalAIWorker]:
        """Approved and healthy; forgotten afterwards."""
        worker = LocalAIWorker(self.cluster.members[0].url, self.cluster.bus_url, SHARED, name)
        worker.backends.ways.upgrades = upgrades
        await worker.register()
        await self.api("POST", f"/api/nodes/{name}/approve")
        await worker.acquire()
        await worker.connect()
        beating = asyncio.create_task(worker.run_heartbeats())
        try:
            yield worker
            assert worker.errors == []
        finally:
            beating.cancel()
            await asyncio.gather(beating, return_exceptions=True)
            await worker.close()
            await self.api("DELETE", f"/api/nodes/{name}")


@pytest.fixture(scope="module")
def yard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Yard]:
    yard = Yard(tmp_path_factory.mktemp("yard"))
    try:
        yard.cluster.start()
        yield yard
    finally:
        yard.cluster.close()


async def test_installed_upgraded_and_deleted_each_seen_in_its_own_list(yard: Yard) -> None:
    yard.publish("1")
    async with yard.worker("old-hand") as worker:
        backends = worker.backends
        job = await yard.ask("install", "engine", "old-hand")
        await yard.done(job)
        assert backends.orders("install") == [{"backend": "engine", "backend_galleries": yard.galleries, "op_id": job}]
        assert backends.processes == {"engine#0": ("engine", 50051)}, "an admin install starts its process"
        assert (await backends._list({}))["backends"][0]["name"] == "cuda12-engine", "the entry itself is not listed"
        assert (await yard.backends("old-hand"))["cuda12-engine"]["version"] == "1"

        yard.publish("2")
        job = await yard.ask("upgrade", "engine", "old-hand")
        await yard.done(job)
        assert backends.orders("upgrade") == [{"backend": "engine", "backend_galleries": yard.galleries, "op_id": job}]
        assert backends.processes == {}, "an upgrade starts nothing"
        assert (await yard.backends("old-hand"))["cuda12-engine"]["version"] == "2"

        await yard.done(await yard.ask("delete", "engine", "old-hand"))
        assert backends.orders("delete") == [{"backend": "engine"}]
        assert backends.folders == {}
        assert await yard.backends("old-hand") == {}

        orders = [subject for subject, _ in backends.asked]
        for kind in ("install", "upgrade", "delete"):
            after = orders[orders.index(f"backend.{kind}") + 1]
            assert after == "backend.list", "nobody believes a mere answer"
        assert not any("accept" in body or "attempt" in body for _, body in backends.asked)
        assert len(backends.orders("install")) == 1


async def test_a_gallery_that_it_cannot_read_is_not_sent_with_entries_of_another(yard: Yard) -> None:
    yard.publish("1")
    async with yard.worker("strict-hand") as worker:
        worker.backends.ways.unreadable = {"private"}
        await yard.done(await yard.ask("install", "solo", "strict-hand"))
        assert [order["backend_galleries"] for order in worker.backends.orders("install")] == [yard.galleries]
        job = await yard.ask("install", "private-engine", "strict-hand")
        row = await yard.row(job, lambda row: row["status"] == "error", "its refusal")
        assert "failed to get gallery private" in row["error"]
        worker.backends.ways.unreadable = set()
        await yard.done(job)


async def test_its_progress_is_shown_and_an_install_that_outlasts_the_call_is_still_running(yard: Yard) -> None:
    async with yard.worker("slow-hand") as worker:
        worker.backends.ways.gate = asyncio.Event()
        job = await yard.ask("install", "engine", "slow-hand")
        row = await yard.row(job, lambda row: row["status"] == "downloading" and row.get("total", ""), "progress")
        assert (row["file_name"], row["total"], row["phase"]) == ("cuda12-engine", "2.1 GiB", "downloading")
        row = await yard.row(job, lambda row: row["status"] == "running_on_worker", "outcome of the time out")
        view = await yard.operation(job)
        assert view["message"] == "worker still installing in background: slow-hand"
        assert (view["processed"], view["progress"] == 100, view.get("error", "")) == (True, False, "")
        assert view["state"] == "under_way"
        worker.backends.ways.gate.set()
        await yard.done(job)
        assert len(worker.backends.orders("install")) == 1, "not asked again while it was at it"

        yard.publish("slow-2")
        worker.backends.ways.gate = asyncio.Event()
        job = await yard.ask("upgrade", "engine", "slow-hand")
        row = await yard.row(job, lambda row: row["status"] == "running_on_worker", "outcome of the time out")
        assert not row.get("failures")
        worker.backends.ways.gate.set()
        await yard.done(job)
        assert len(worker.backends.orders("upgrade")) == 1
        assert (await yard.backends("slow-hand"))["cuda12-engine"]["version"] == "slow-2"


async def test_a_silent_old_worker_without_upgrades_reinstalls_by_force(yard: Yard) -> None:
    yard.publish("1")
    async with yard.worker("oldest-hand", upgrades=False) as worker:
        backends = worker.backends
        backends.ways.ticks = 0
        backends.ways.digests = False
        await yard.done(await yard.ask("install", "solo", "oldest-hand"))
        before = backends.folders["solo"].installed_at
        yard.publish("2")
        job = await yard.ask("upgrade", "solo", "oldest-hand")
        view = await yard.done(job)
        assert [row["status"] for row in view["nodes"]] == ["success"]
        first, second = backends.orders("install")
        assert "force" not in first
        assert second == {"backend": "solo", "backend_galleries": yard.galleries, "force": True, "op_id": job}
        assert backends.folders["solo"].installed_at > before
        assert backends.folders["solo"].version == "2"


async def test_a_uri_is_trusted_and_an_archive_which_has_no_wire_form_is_refused_before_it_is_sent(yard: Yard) -> None:
    async with yard.worker("given-hand") as worker:
        folder = yard.folder / "mlx"
        await asyncio.to_thread(mock_copy, folder)
        path = "/api/nodes/given-hand/backends/install"
        job = (await yard.api("POST", path, {"uri": str(folder), "name": "mine"}))["jobID"]
        await yard.done(job)
        sent = worker.backends.orders("install")
        assert sent == [{"backend": "mine", "name": "mine", "uri": str(folder), "op_id": job}]

        archive = {"uri": f"file://{yard.folder}/mine.tar.gz", "name": "packed"}
        member = yard.cluster.members[0]
        answer = await asyncio.to_thread(yard.cluster.api, member, "POST", path, archive)
        assert answer.status == 400, answer.body
        assert b"a LocalAI worker installs by URI only images" in answer.body
        assert worker.backends.orders("install") == sent


@pytest.mark.parametrize("digests", [True, False])
async def test_an_upgrade_from_a_cached_index_is_no_success_and_tried_again(yard: Yard, digests: bool) -> None:
    yard.publish("1")
    async with yard.worker("cached-hand") as worker:
        worker.backends.ways.caches_indexes = True
        worker.backends.ways.digests = digests
        await yard.done(await yard.ask("install", "solo", "cached-hand"))
        yard.publish("2")
        job = await yard.ask("upgrade", "solo", "cached-hand")
        row = await yard.row(job, lambda row: bool(row.get("next_retry_at")), "its next try")
        assert row["status"] == "error"
        assert "still reports version 1, not 2" in row["error"]
        assert "up to an hour" in row["error"]
        worker.backends.ways.caches_indexes = False
        view = await yard.done(job)
        assert [(row["status"], row["version"]) for row in view["nodes"]] == [("success", "2")]
        assert "note" not in view["nodes"][0]
        assert len(worker.backends.orders("upgrade")) >= 2


async def test_an_upgrade_that_only_its_date_shows_is_marked_as_unverified(yard: Yard) -> None:
    yard.publish("1")
    async with yard.worker("silent-hand") as worker:
        worker.backends.ways.digests = worker.backends.ways.versions = False
        await yard.done(await yard.ask("install", "solo", "silent-hand"))
        yard.publish("2")
        view = await yard.done(await yard.ask("upgrade", "solo", "silent-hand"))
        row = view["nodes"][0]
        assert (row["status"], "error" in row) == ("success", False)
        assert row["note"].startswith("unverified: ")


async def test_other_errors_of_an_upgrade_are_its_answer_and_it_stays_an_upgrade(yard: Yard) -> None:
    yard.publish("1")
    async with yard.worker("full-hand") as worker:
        await yard.done(await yard.ask("install", "solo", "full-hand"))
        yard.publish("2")
        worker.backends.ways.refuses = {"upgrade": "installing backend from gallery: no space left on device"}
        job = await yard.ask("upgrade", "solo", "full-hand")
        row = await yard.row(job, lambda row: row["status"] == "error", "its refusal")
        assert row["error"] == "installing backend from gallery: no space left on device"
        worker.backends.ways.refuses = {}
        await yard.done(job)
        assert len(worker.backends.orders("install")) == 1, "no fallback"
        assert len(worker.backends.orders("upgrade")) >= 2
        assert worker.backends.folders["solo"].version == "2"


async def test_a_delete_that_is_refused_counts_as_failed_and_what_is_the_systems_is_never_tried(yard: Yard) -> None:
    async with yard.worker("stubborn-hand") as worker:
        worker.backends.folders["piper"] = Build("piper", system=True)
        await yard.done(await yard.ask("install", "solo", "stubborn-hand"))
        worker.backends.ways.refuses = {"delete": "solo#0 is still running"}
        job = await yard.ask("delete", "solo", "stubborn-hand")
        row = await yard.row(job, lambda row: row["status"] == "error", "its refusal")
        assert row["error"] == "solo#0 is still running"
        worker.backends.ways.refuses = {}
        await yard.done(job)
        assert set(worker.backends.folders) == {"piper"}
        member = yard.cluster.members[0]
        path = "/api/nodes/stubborn-hand/backends/delete"
        answer = await asyncio.to_thread(yard.cluster.api, member, "POST", path, {"backend": "piper"})
        assert answer.status == 400, answer.body
        assert {"backend": "piper"} not in worker.backends.orders("delete")


async def test_it_is_asked_again_and_again_what_it_has(yard: Yard) -> None:
    async with yard.worker("busy-hand") as worker:
        await until(lambda: worker.backends.orders("list"), "question")
        worker.backends.folders["vllm"] = Build("vllm", version="7")  # somebody installed it there by hand

        async def shown() -> bool:
            return bool((await yard.backends("busy-hand"))["vllm"]["version"] == "7")

        await until(shown, "new row")
        assert worker.backends.asked.count(("backend.list", {})) == len(worker.backends.asked)


async def test_a_mixed_fleet_without_spurious_errors(yard: Yard) -> None:
    yard.publish("1")
    cluster, member = yard.cluster, yard.cluster.members[0]
    token = await asyncio.to_thread(cluster.token, member, pre_approved=True)
    await asyncio.to_thread(cluster.join, member, "barn", token)
    await asyncio.to_thread(cluster.wait_status, member, "barn", "healthy", 60)
    async with yard.worker("old-hand") as worker:
        everywhere = {"barn", "old-hand"}

        async def through(job: str) -> None:
            seen: set[str] = set()

            async def look() -> bool:
                view = await yard.operation(job)
                assert {row["node_name"] for row in view["nodes"]} == everywhere, "never fewer rows than nodes"
                seen.update(row["status"] for row in view["nodes"])
                assert view["state"] == "done", view
                return True

            await until(look, f"end of {job}", 60)
            assert "error" not in seen

        await through((await yard.api("POST", "/backends/apply", {"id": "engine"}))["id"])
        assert set(await yard.backends("barn")) == {"engine", "cpu-engine"}
        assert set(await yard.backends("old-hand")) == {"cuda12-engine"}
        yard.publish("2")
        await asyncio.to_thread((yard.source / "VERSION").write_text, "2\n")
        newer = await yard.api("POST", "/api/backends/upgrades/check?wait=true")
        assert {"cpu-engine", "cuda12-engine"} <= set(newer)
        await through((await yard.api("POST", "/backends/upgrade/engine"))["id"])
        assert (await yard.backends("barn"))["cpu-engine"]["version"] == "2"
        assert (await yard.backends("old-hand"))["cuda12-engine"]["version"] == "2"
        newer = await yard.api("POST", "/api/backends/upgrades/check?wait=true")
        assert not {"cpu-engine", "cuda12-engine"} & set(newer), "nothing is left to upgrade after one check"
        await through((await yard.api("POST", "/backends/delete/engine"))["id"])
        assert await yard.backends("barn") == {}
        assert worker.backends.folders == {}
