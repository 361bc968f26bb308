"""Joining: tokens, approval, names, deletion, and a controller that is away or talks nonsense."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import structlog

from corral.worker.status import FatalError
from tests.support.nats import NatsServer, nats_server
from tests.support.running_worker import running_worker
from tests.support.scripted_controller import ScriptedController
from tests.support.waiting import until

__all__ = ["nats_server"]


@pytest.fixture
async def controller(nats_server: NatsServer) -> AsyncIterator[ScriptedController]:
    async with ScriptedController(nats_server) as started:
        yield started


async def test_a_new_node_tells_what_the_contract_asks(controller: ScriptedController, tmp_path: Path) -> None:
    token = controller.token()
    async with running_worker(controller.url, tmp_path / "w", token=token, labels="tier=fast, x = 1") as worker:
        await worker.ready()
        node = controller.named("w1")
        said = node.registrations[0]
        assert said["name"] == "w1"
        assert said["node_type"] == "backend"
        assert said["token"] == token
        assert said["enrolment"].startswith("ce_")
        assert said["labels"] == {"tier": "fast", "x": "1", "node.replica-slots": "1"}
        assert said["max_replicas_per_model"] == 1
        assert said["protocol"] == 1
        assert said["platform"].startswith("linux/")
        assert said["total_ram"] > 0
        assert said["total_disk"] > 0
        assert said["ingress"]["port"] == worker.settings.ingress.port
        assert "CERTIFICATE REQUEST" in said["ingress"]["csr"]
        assert "address" not in said  # the controller sees better
        assert worker.identity["node_id"] == node.id
        assert worker.identity["node_token"] == node.token


async def test_pending_until_a_person_approves(controller: ScriptedController, tmp_path: Path) -> None:
    token = controller.token(pre_approved=False)
    with structlog.testing.capture_logs() as logs:
        await _wait_and_be_approved(controller, tmp_path, token)
    told = [each["event"] for each in logs if "waiting for approval" in each["event"]]
    assert told == ["waiting for approval: run `corral nodes approve w1`, or approve it on the cluster's page"]
    assert controller.tokens[token].uses == 0


async def _wait_and_be_approved(controller: ScriptedController, tmp_path: Path, token: str) -> None:
    async with running_worker(controller.url, tmp_path / "w", token=token) as worker:
        await until(lambda: controller.credentials_given >= 3)
        assert await worker.get("/healthz") == (200, "ok")
        assert await worker.get("/readyz") == (503, "not ready: waiting for approval")
        assert "POST heartbeat" not in controller.calls
        controller.approve("w1")
        await worker.ready()
        assert controller.calls.count("POST register") == 1


async def test_leaving_while_pending_says_no_goodbye(controller: ScriptedController, tmp_path: Path) -> None:
    async with running_worker(controller.url, tmp_path / "w", token=controller.token(pre_approved=False)) as worker:
        await until(lambda: controller.credentials_given >= 1)
        await worker.leave()
    assert "POST deregister" not in controller.calls
    assert controller.named("w1").status == "pending"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"refusal": "the token expired an hour ago"}, "the token expired an hour ago"),
        ({"uses": 0}, "the token was already used"),
        (None, "no such token"),
    ],
)
async def test_a_token_that_opens_nothing_ends_the_worker(
    controller: ScriptedController, tmp_path: Path, options: dict[str, object] | None, words: str
) -> None:
    token = "cj_made_up" if options is None else controller.token(**options)
    async with running_worker(controller.url, tmp_path / "w", token=token) as worker:
        with pytest.raises(FatalError) as caught:
            await worker.ended()
    assert words in caught.value.message
    assert "corral token create" in caught.value.message
    assert "\n" not in caught.value.message
    assert controller.calls == ["POST register"]


async def test_without_any_token(controller: ScriptedController, tmp_path: Path) -> None:
    async with running_worker(controller.url, tmp_path / "w") as worker:
        with pytest.raises(FatalError, match="a join token is needed"):
            await worker.ended()
    assert controller.calls == []


async def test_a_token_file(controller: ScriptedController, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(controller.token() + "\n")
    async with running_worker(controller.url, tmp_path / "w", token_file=str(tmp_path / "token")) as worker:
        await worker.ready()
        await worker.leave()
    (tmp_path / "token").unlink()  # it was needed once
    async with running_worker(controller.url, tmp_path / "w", token_file=str(tmp_path / "token")) as worker:
        await worker.ready()


async def test_two_workers_with_one_name(controller: ScriptedController, tmp_path: Path) -> None:
    async with running_worker(controller.url, tmp_path / "first", token=controller.token()) as first:
        await first.ready()
        async with running_worker(controller.url, tmp_path / "second", token=controller.token()) as second:
            with pytest.raises(FatalError, match="corral nodes replace w1"):
                await second.ended()
        assert await first.get("/readyz") == (200, "ok")


async def test_a_lost_reply_strands_nobody(controller: ScriptedController, tmp_path: Path) -> None:
    controller.lose_next_reply("register")
    token = controller.token(uses=1)
    async with running_worker(controller.url, tmp_path / "w", token=token) as worker:
        await worker.ready()
        assert len(controller.nodes) == 1
        assert len(controller.named("w1").registrations) == 2
        assert worker.identity["node_token"] == controller.named("w1").token


async def test_a_restart_needs_nothing_but_its_folder(controller: ScriptedController, tmp_path: Path) -> None:
    async with running_worker(controller.url, tmp_path / "w", token=controller.token()) as worker:
        await worker.ready()
        node_id = worker.identity["node_id"]
        await worker.leave()
    async with running_worker("", tmp_path / "w", name="") as worker:
        await worker.ready()
        assert worker.identity["node_id"] == node_id
        assert len(set(controller.named("w1").boot_ids)) == 2


async def test_the_controller_may_be_away_at_the_start(controller: ScriptedController, tmp_path: Path) -> None:
    await controller.stop()
    async with running_worker(controller.url, tmp_path / "w", token=controller.token()) as worker:
        await until((tmp_path / "w" / "identity.json").exists)
        assert await worker.answer("/readyz") == (503, "not ready: not registered yet")
        await controller.start()
        await worker.ready()


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (500, b'{"error":"database is locked"}'),
        (502, b"<html>bad gateway</html>"),
        (503, b""),
        (429, b""),
        (201, b"{half"),
        (201, b"[]"),
        (201, b"{}"),
        (201, b'{"id":7}'),
        (201, b"\xff\xfe\x00"),
        (200, b"x" * (2 << 20)),
    ],
)
async def test_what_time_may_cure_is_tried_again(
    controller: ScriptedController, tmp_path: Path, status: int, body: bytes
) -> None:
    for _ in range(3):
        controller.answer_next("register", status, body)
    async with running_worker(controller.url, tmp_path / "w", token=controller.token()) as worker:
        await worker.ready()
    assert controller.calls.count("POST register") == 4


@pytest.mark.parametrize(
    ("status", "words"),
    [(400, "refuses this node"), (404, "has no node API"), (413, "refuses this node"), (422, "refuses this node")],
)
async def test_what_time_does_not_cure_ends_the_worker(
    controller: ScriptedController, tmp_path: Path, status: int, words: str
) -> None:
    controller.answer_next("register", status, b'{"error":"no"}')
    async with running_worker(controller.url, tmp_path / "w", token=controller.token()) as worker:
        with pytest.raises(FatalError, match=words):
            await worker.ended()


async def test_a_forgotten_node_registers_again(controller: ScriptedController, tmp_path: Path) -> None:
    token = controller.token(uses=2)
    async with running_worker(controller.url, tmp_path / "w", token=token) as worker:
        await worker.ready()
        controller.forget("w1")
        await until(lambda: controller.knows("w1"))
        await until(lambda: worker.identity["node_id"] == controller.named("w1").id)
        await worker.ready()
        await until(lambda: controller.named("w1").beats)


async def test_a_deleted_node_comes_back_as_a_new_one(controller: ScriptedController, tmp_path: Path) -> None:
    token = controller.token(uses=2)
    async with running_worker(controller.url, tmp_path / "w", token=token) as worker:
        await worker.ready()
        before = worker.identity
        controller.delete("w1")
        await until(lambda: controller.knows("w1"))
        await until(lambda: worker.identity["node_id"] == controller.named("w1").id)
        await worker.ready()
        assert worker.identity["node_id"] != before["node_id"]
        assert worker.identity["enrolment"] != before["enrolment"]
        _, hello = await worker.get("/corral/hello", controller.ingress_token(aud=controller.named("w1").id))
        assert controller.named("w1").id in hello


@pytest.mark.parametrize("token_still_given", [True, False])
async def test_a_deleted_node_without_a_good_token_ends_with_a_line(
    controller: ScriptedController, tmp_path: Path, token_still_given: bool
) -> None:
    token = controller.token(uses=1)
    async with running_worker(controller.url, tmp_path / "w", token=token) as worker:
        await worker.ready()
        await worker.leave()
    async with running_worker(controller.url, tmp_path / "w", token=token if token_still_given else "") as worker:
        await worker.ready()
        controller.delete("w1")
        with pytest.raises(FatalError, match="corral token create"):
            await worker.ended()


async def test_a_node_deleted_while_its_worker_was_off(controller: ScriptedController, tmp_path: Path) -> None:
    async with running_worker(controller.url, tmp_path / "w", token=controller.token()) as worker:
        await worker.ready()
        await worker.leave()
    controller.delete("w1")
    async with running_worker(controller.url, tmp_path / "w", token=controller.token()) as worker:
        await worker.ready()
        assert len(controller.nodes) == 1
        assert len(controller.deleted) == 1


async def test_a_refused_node_token_makes_way_for_a_join_token(controller: ScriptedController, tmp_path: Path) -> None:
    async with running_worker(controller.url, tmp_path / "w", token=controller.token()) as worker:
        await worker.ready()
        await worker.leave()
    controller.nodes.clear()  # another cluster, or a lost database: it has never seen this node
    async with running_worker(controller.url, tmp_path / "w", token=controller.token()) as worker:
        await worker.ready()
        assert worker.identity["node_token"] == controller.named("w1").token


async def test_a_controller_that_knows_nobody_is_not_hammered(controller: ScriptedController, tmp_path: Path) -> None:
    at: list[float] = []
    controller.before = lambda call: at.append(time.monotonic()) if call == "register" else None
    async with running_worker(
        controller.url, tmp_path / "w", token=controller.token(), retry_first="200ms", retry_cap="30s"
    ) as worker:
        for _ in range(50):
            controller.answer_next("heartbeat", 401, b'{"error":"who?"}')
        await until(lambda: len(at) >= 4)
        assert at[3] - at[2] > 0.5
        assert not worker.task.done()
