"""A bus on a real server over time: renewal, expiry, revocation, servers that die, freeze, come late or say no."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from corral.bus.api import Bus, BusCredentials, FixedCredentials, Tokens
from corral.bus.auth import MintedUser
from corral.bus.embedded import EmbeddedServer, ServerSettings
from corral.bus.nats import NatsBus
from corral.contract.messages.backends import INSTALL_BACKEND, InstallBackend, InstallReply
from corral.contract.messages.hints import VIEW_CHANGED, ViewChanged
from corral.contract.messages.nodes import NODE_HEARTBEAT, BusHeartbeat
from corral.kit.errors import OutcomeUnknown, Unavailable, Unreachable
from tests.integration.bus.refusals import refused_for
from tests.support.nats import Minting, NatsServer, quick_settings
from tests.support.processes import free_port
from tests.support.waiting import promised, until

WAIT_S = 30.0


async def answer(request: InstallBackend, tokens: Tokens) -> InstallReply:
    return InstallReply(success=True, address=request.backend)


async def order(bus: Bus, node: str = "a", backend: str = "x", timeout_s: float = WAIT_S) -> InstallReply:
    return await bus.call(INSTALL_BACKEND, InstallBackend(backend=backend), timeout_s=timeout_s, node=node)


@contextlib.asynccontextmanager
async def controller_and_node(server: NatsServer) -> AsyncIterator[tuple[NatsBus, NatsBus]]:
    async with server.bus(server.service()) as controller, server.bus(server.node("a")) as node:
        await controller.wait_connected(WAIT_S)
        await node.wait_connected(WAIT_S)
        await node.serve(INSTALL_BACKEND, answer, concurrency=16, node="a")
        yield controller, node


async def test_credentials_of_3_s_over_15_s_lose_nothing(nats_server: NatsServer) -> None:
    """Both ends renew all the time. At a steady rate no call fails, no event is lost, none comes twice, and orders that
    are under way during a renewal are answered. They last longer than they say, since a machine may stand still for a
    second, and shorter than the test: whoever does not renew is thrown out."""

    def said_to_last_3_s(user: MintedUser) -> MintedUser:
        return dataclasses.replace(user, expires_in_s=3.0)

    sources = (
        Minting(lambda: said_to_last_3_s(nats_server.service(ttl_s=10))),
        Minting(lambda: said_to_last_3_s(nats_server.node("a", ttl_s=10))),
    )
    controller = nats_server.bus(nats_server.service(), source=sources[0])
    node = nats_server.bus(nats_server.node("a"), source=sources[1])
    heard: list[int] = []
    heard_in_group: list[int] = []
    served: list[int] = []
    changes: list[bool] = []

    async def serve(request: InstallBackend, tokens: Tokens) -> InstallReply:
        served.append(int(request.op_id))
        if request.backend == "slow":
            await asyncio.sleep(0.3)  # longer than a renewal takes
        return InstallReply(success=True, address=request.backend)

    async def hear(message: BusHeartbeat, tokens: Tokens) -> None:
        heard.append(int(message.boot_id))

    async def hear_in_group(message: BusHeartbeat, tokens: Tokens) -> None:
        heard_in_group.append(int(message.boot_id))

    async with controller, node:
        await controller.wait_connected(WAIT_S)
        await node.wait_connected(WAIT_S)
        for bus in (controller, node):
            bus.on_change(changes.append)
        await node.serve(INSTALL_BACKEND, serve, concurrency=64, node="a")
        await controller.subscribe(NODE_HEARTBEAT, hear)
        await controller.subscribe(NODE_HEARTBEAT, hear_in_group, queue="controllers")
        started = time.monotonic()
        calls: list[asyncio.Task[InstallReply]] = []
        told = 0
        async with asyncio.TaskGroup() as group:
            while (elapsed := time.monotonic() - started) < 15 or told <= 400:
                install = InstallBackend(backend="slow" if told % 5 == 0 else "quick", op_id=str(told))
                calls.append(group.create_task(controller.call(INSTALL_BACKEND, install, timeout_s=WAIT_S, node="a")))
                await node.publish(NODE_HEARTBEAT, BusHeartbeat(boot_id=str(told)), node="a")
                told += 1
                await asyncio.sleep(max(0.0, told * 0.02 - elapsed))
        assert all(call.result().success for call in calls)
        await until(lambda: len(heard) >= told and len(heard_in_group) >= told, "every event")
        for each in (served, heard, heard_in_group):
            assert sorted(each) == list(range(told))
        assert changes == []  # renewal is no gap
        assert controller.connected_since is not None
        assert controller.connected_since <= started
        assert min(source.asked for source in sources) >= 5


async def test_renewing_in_a_flood_loses_nothing(nats_server: NatsServer) -> None:
    """The hand-over itself, many times over, with messages on their way at every moment of it."""

    class Hasty:
        asked = 0

        async def current(self) -> BusCredentials:
            self.asked += 1
            fresh = nats_server.service(ttl_s=3600 + self.asked)  # another token each time
            return dataclasses.replace(fresh.credentials(), expires_in_s=0.01)

    source = Hasty()
    settings = dataclasses.replace(quick_settings(), min_renewal_s=0.02)
    heard: list[int] = []

    async def hear(message: ViewChanged, tokens: Tokens) -> None:
        heard.append(message.row_version)

    async with (
        nats_server.bus(nats_server.service(), source=source, settings=settings) as listener,
        nats_server.bus(nats_server.service()) as teller,
    ):
        await listener.wait_connected(WAIT_S)
        await teller.wait_connected(WAIT_S)
        await listener.subscribe(VIEW_CHANGED, hear)
        told = 0
        while source.asked < 40 or told <= 1000:
            for _ in range(20):
                await teller.publish(VIEW_CHANGED, ViewChanged(kind="nodes", row_version=told))
                told += 1
            await asyncio.sleep(0.001)
        await until(lambda: len(heard) >= told, "every event")
        assert sorted(heard) == list(range(told))


@pytest.mark.parametrize("failure", [Unavailable("the controller is away"), RuntimeError("a bug")])
async def test_when_renewal_fails_the_bus_returns_as_soon_as_credentials_do(
    nats_server: NatsServer, failure: Exception
) -> None:
    class Moody:
        """Gives 2 s credentials, then fails for a while, then gives lasting ones."""

        def __init__(self) -> None:
            self.failing = False
            self.ttl_s = 2
            self.asked = 0

        async def current(self) -> BusCredentials:
            self.asked += 1
            if self.failing:
                raise failure
            return nats_server.node("a", ttl_s=self.ttl_s).credentials()

    source = Moody()
    async with (
        nats_server.bus(nats_server.service()) as controller,
        nats_server.bus(nats_server.node("a"), source=source) as node,
    ):
        await controller.wait_connected(WAIT_S)
        await node.wait_connected(WAIT_S)
        await node.serve(INSTALL_BACKEND, answer, node="a")
        source.failing = True
        await until(lambda: not node.connected, "the end of the credentials")
        with pytest.raises(Unavailable, match="the bus is not connected"):
            await node.publish(NODE_HEARTBEAT, BusHeartbeat(), node="a")
        asked = source.asked
        await until(lambda: source.asked > asked + 3, "more tries")
        source.failing, source.ttl_s = False, 3600
        await node.wait_connected(WAIT_S)
        assert (await order(controller)).success


async def test_credentials_that_stay_the_same_are_no_reason_to_reconnect(nats_server: NatsServer) -> None:
    class Lasting:
        def __init__(self) -> None:
            self.asked = 0
            self.minted = nats_server.node("a", ttl_s=3600)

        async def current(self) -> BusCredentials:
            self.asked += 1
            return BusCredentials(jwt=self.minted.jwt, seed=self.minted.seed, expires_in_s=0.1)

    source = Lasting()
    async with nats_server.bus(source.minted, source=source) as node:
        await node.wait_connected(WAIT_S)
        link = node._connection
        await until(lambda: source.asked >= 3, "two renewals")
        assert node._connection is link


async def test_a_revoked_node_is_dropped_at_once_and_stays_out(nats_server: NatsServer) -> None:
    """Also with credentials minted after the revocation, and also after the server restarted; others notice nothing."""
    async with controller_and_node(nats_server) as (controller, node), nats_server.bus(nats_server.node("b")) as other:
        await other.wait_connected(WAIT_S)
        await other.serve(INSTALL_BACKEND, answer, node="b")
        changes: list[bool] = []
        for bus in (controller, other):
            bus.on_change(changes.append)
        await nats_server.revoke(nats_server.node("a").public_key)
        revoked_at = time.monotonic()
        await until(lambda: not node.connected, "the drop")
        assert time.monotonic() - revoked_at < promised(1)
        await until(lambda: nobody_answers(controller), "end of its subscriptions")
        assert (await order(controller, "b")).success
        assert changes == []
        source = Minting(lambda: nats_server.node("a"))
        async with nats_server.bus(nats_server.node("a"), source=source) as again:
            await refused_for(again, "the server refuses our credentials")
            assert not node.connected
            await nats_server.server.restart()
            await other.wait_connected(WAIT_S)
            await controller.wait_connected(WAIT_S)
            before = source.asked
            await until(lambda: source.asked > before + 1, "a try from beginning to end")
            await refused_for(again, "the server refuses our credentials")
        assert (await order(controller, "b")).success


async def nobody_answers(controller: NatsBus) -> bool:
    """The server closes a connection first and forgets who listened on it a moment later."""
    try:
        await order(controller, timeout_s=0.5)
    except Unreachable:
        return True
    except OutcomeUnknown:
        return False
    raise AssertionError("somebody has answered")


async def test_a_second_revocation_keeps_the_first(nats_server: NatsServer) -> None:
    first, second = nats_server.node("a"), nats_server.node("b")
    await nats_server.revoke(first.public_key)
    await nats_server.revoke(second.public_key)
    for user in (first, second):
        async with nats_server.bus(user) as bus:
            await refused_for(bus, "the server refuses our credentials")


async def test_everything_works_again_after_the_server_was_killed(nats_server: NatsServer) -> None:
    async with controller_and_node(nats_server) as (controller, node):
        heard: list[ViewChanged] = []

        async def hear(message: ViewChanged, tokens: Tokens) -> None:
            heard.append(message)

        await controller.subscribe(VIEW_CHANGED, hear)
        await nats_server.server.kill()
        await until(lambda: not controller.connected and not node.connected, "the loss being noticed")
        with pytest.raises(Unavailable):
            await order(controller)
        await nats_server.server.start()
        await controller.wait_connected(WAIT_S)
        await node.wait_connected(WAIT_S)
        assert (await order(controller)).success
        await controller.publish(VIEW_CHANGED, ViewChanged(kind="nodes"))
        await until(lambda: heard, "an event")


async def test_a_frozen_server_is_noticed_and_forgiven(nats_server: NatsServer) -> None:
    """SIGSTOP: the connection stays open and says nothing, which no error will ever report."""
    settings = quick_settings(ping_interval_s=0.2, ping_timeout_s=0.3, connect_timeout_s=0.5)
    async with (
        nats_server.bus(nats_server.service(), settings=settings) as controller,
        nats_server.bus(nats_server.node("a"), settings=settings) as node,
    ):
        await controller.wait_connected(WAIT_S)
        await node.wait_connected(WAIT_S)
        await node.serve(INSTALL_BACKEND, answer, node="a")
        pid = nats_server.server.pid
        assert pid is not None
        await freeze(pid)
        try:
            with pytest.raises((OutcomeUnknown, Unavailable)):
                await order(controller, timeout_s=0.2)
            await until(lambda: not controller.connected and not node.connected, "the silence being noticed")
            with pytest.raises(Unavailable):
                await order(controller)
        finally:
            os.kill(pid, signal.SIGCONT)

        async def answered() -> bool:
            """With pings as impatient as these a machine that is busy looks frozen, too, now and then."""
            try:
                return (await order(controller, timeout_s=1)).success
            except (OutcomeUnknown, Unavailable, Unreachable):
                return False

        await until(answered, "an answer")


async def flood(bus: Bus) -> None:
    while True:
        await bus.publish(VIEW_CHANGED, ViewChanged(kind="x" * 400_000))


async def freeze(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    status = Path(f"/proc/{pid}/stat")
    await until(lambda: status.read_text().rpartition(")")[2].split()[0] == "T", "the freeze")


async def test_a_flood_into_a_frozen_server_is_not_kept_for_ever(nats_server: NatsServer) -> None:
    settings = quick_settings(ping_interval_s=0.2, ping_timeout_s=0.3, connect_timeout_s=0.5)
    async with nats_server.bus(nats_server.service(), settings=settings) as controller:
        await controller.wait_connected(WAIT_S)
        pid = nats_server.server.pid
        assert pid is not None
        await freeze(pid)
        try:
            with pytest.raises(Unavailable):
                await flood(controller)
            await until(lambda: not controller.connected, "the loss being noticed")
        finally:
            os.kill(pid, signal.SIGCONT)
        await controller.wait_connected(WAIT_S)


async def test_a_server_that_comes_late_is_fine(tmp_path: Path, nats_server: NatsServer) -> None:
    """Subscriptions made before there is a server take effect when there is one."""
    settings = ServerSettings(folder=tmp_path / "late", port=free_port())
    late = EmbeddedServer(settings, nats_server.keys)
    with capture_logs() as logs:
        async with (
            nats_server.bus(nats_server.service(), url=late.url) as controller,
            nats_server.bus(nats_server.node("a"), url=late.url) as node,
        ):
            await node.serve(INSTALL_BACKEND, answer, node="a")
            with pytest.raises(Unavailable, match="the bus is not connected"):
                await controller.wait_connected(0.5)
            with pytest.raises(Unavailable):
                await order(controller)
            async with late:
                await controller.wait_connected(WAIT_S)
                await node.wait_connected(WAIT_S)
                assert (await order(controller)).success
    failures = [entry for entry in logs if entry["event"] == "bus cannot be reached; retrying"]
    assert len(failures) == 2  # one each, however many tries


async def test_wrong_credentials_give_one_clear_line_and_are_tried_for_ever(nats_server: NatsServer) -> None:
    good, bad = nats_server.node("a"), nats_server.node("b")
    mixed = MintedUser(good.jwt, bad.seed, bad.public_key, "_INBOX_a", None)

    class Corrected:
        def __init__(self) -> None:
            self.asked = 0
            self.right = False

        async def current(self) -> BusCredentials:
            self.asked += 1
            return (good if self.right else mixed).credentials()

    source = Corrected()
    with capture_logs() as logs:
        async with nats_server.bus(good, source=source) as node:
            await until(lambda: source.asked > 5, "several tries")
            await refused_for(node, "the server refuses our credentials")
            told = [entry for entry in logs if entry["log_level"] in ("warning", "error")]
            assert [entry["reason"] for entry in told if "refuses" in str(entry)] == [
                f"{nats_server.url}: the server refuses our credentials"
            ]
            source.right = True
            await node.wait_connected(WAIT_S)
    assert good.seed not in str(logs)
    assert good.jwt not in str(logs)


async def test_a_source_that_crashes_or_hangs_is_asked_again(nats_server: NatsServer) -> None:
    class Broken:
        asked = 0

        async def current(self) -> BusCredentials:
            self.asked += 1
            if self.asked == 1:
                raise RuntimeError("boom")
            if self.asked == 2:
                await asyncio.Event().wait()
            return nats_server.node("a").credentials()

    source = Broken()
    settings = dataclasses.replace(quick_settings(), credentials_timeout_s=0.1)
    async with nats_server.bus(nats_server.node("a"), source=source, settings=settings) as node:
        await node.wait_connected(WAIT_S)
        assert source.asked == 3


async def test_with_several_urls_the_first_that_answers_is_used(nats_server: NatsServer) -> None:
    user = nats_server.node("a")
    urls = [f"nats://127.0.0.1:{free_port()}", nats_server.url]
    bus = NatsBus(urls, FixedCredentials(user.credentials()), inbox_prefix=user.inbox, settings=quick_settings())
    async with bus:
        await bus.wait_connected(WAIT_S)


async def test_leaving_lets_a_running_handler_answer(nats_server: NatsServer) -> None:
    begun = asyncio.Event()
    release = asyncio.Event()

    async def slow(request: InstallBackend, tokens: Tokens) -> InstallReply:
        begun.set()
        await release.wait()
        return InstallReply(success=True)

    async with nats_server.bus(nats_server.service()) as controller:
        await controller.wait_connected(WAIT_S)
        node = nats_server.bus(nats_server.node("a"))
        async with node:
            await node.wait_connected(WAIT_S)
            await node.serve(INSTALL_BACKEND, slow, node="a")
            running = asyncio.create_task(order(controller))
            await begun.wait()
            leaving = asyncio.create_task(node.close())
            await asyncio.sleep(0)  # it is on its way out
            assert not leaving.done()
            release.set()
            await leaving
        assert (await running).success
        assert not node.connected


async def test_leaving_does_not_wait_for_a_handler_that_never_ends(nats_server: NatsServer) -> None:
    begun = asyncio.Event()

    async def endless(request: InstallBackend, tokens: Tokens) -> InstallReply:
        begun.set()
        await asyncio.Event().wait()
        return InstallReply()

    async with nats_server.bus(nats_server.service()) as controller:
        await controller.wait_connected(WAIT_S)
        async with nats_server.bus(nats_server.node("a")) as node:
            await node.wait_connected(WAIT_S)
            await node.serve(INSTALL_BACKEND, endless, node="a")
            running = asyncio.create_task(order(controller, timeout_s=3))
            await begun.wait()
            left_at = time.monotonic()
        assert time.monotonic() - left_at < promised(3)
        with pytest.raises(OutcomeUnknown):
            await running
