"""Connections that break and return, and permissions, on NATS and on its twin."""

from __future__ import annotations

import asyncio
import time

import pytest

from corral.bus.api import Tokens
from corral.bus.permissions import node_permissions, service_permissions
from corral.contract.messages.backends import INSTALL_BACKEND, InstallBackend, InstallReply
from corral.contract.messages.hints import VIEW_CHANGED, ViewChanged
from corral.contract.messages.nodes import NODE_HEARTBEAT, BusHeartbeat
from corral.kit.errors import Denied, OutcomeUnknown, Unavailable, Unreachable
from tests.support.buses import Yard
from tests.support.waiting import until

T_S = 30.0


async def answer(request: InstallBackend, tokens: Tokens) -> InstallReply:
    return InstallReply(success=True, address=request.backend)


async def test_who_is_cut_off_knows_it_and_nothing_is_kept_for_later(yard: Yard) -> None:
    node, controller = await yard.join("n"), await yard.join("c")
    heard: list[ViewChanged] = []

    async def hear(message: ViewChanged, tokens: Tokens) -> None:
        heard.append(message)

    await controller.subscribe(VIEW_CHANGED, hear)
    await yard.cut("n")
    await until(lambda: not node.connected, "the loss being noticed")
    assert node.connected_since is None
    with pytest.raises(Unavailable):
        await node.call(INSTALL_BACKEND, InstallBackend(backend="x"), timeout_s=T_S, node="other")
    with pytest.raises(Unavailable):
        await node.publish(VIEW_CHANGED, ViewChanged(kind="lost"))
    with pytest.raises(Unavailable, match="the bus is not connected"):
        await node.wait_connected(0.1)
    await yard.heal("n")
    await node.wait_connected(T_S)
    await node.publish(VIEW_CHANGED, ViewChanged(kind="after"))
    await until(lambda: heard, "an event after the outage")
    assert heard == [ViewChanged(kind="after")]


async def test_a_node_that_returns_answers_again_without_doing_anything(yard: Yard) -> None:
    node, controller = await yard.join("n"), await yard.join("c")
    changes: list[bool] = []
    node.on_change(changes.append)
    before = node.connected_since
    assert before is not None
    await node.serve(INSTALL_BACKEND, answer, node="n")
    for _ in range(3):
        await yard.cut("n")
        await until(lambda: not node.connected, "the loss being noticed")
        with pytest.raises((Unreachable, OutcomeUnknown)):
            await controller.call(INSTALL_BACKEND, InstallBackend(backend="x"), timeout_s=0.3, node="n")
        await yard.heal("n")
        await node.wait_connected(T_S)
        reply = await controller.call(INSTALL_BACKEND, InstallBackend(backend="x"), timeout_s=T_S, node="n")
        assert reply.success
    assert changes == [False, True] * 3
    assert node.connected_since is not None
    assert before < node.connected_since <= time.monotonic()


async def test_the_one_who_forgot_is_told_no_more_and_a_failing_callback_harms_nobody(yard: Yard) -> None:
    node = await yard.join("n")
    told: list[bool] = []

    def fail(connected: bool) -> None:
        raise RuntimeError("boom")

    node.on_change(fail)
    forget = node.on_change(told.append)
    await yard.cut("n")
    await until(lambda: told == [False], "the first change")
    forget()
    forget()
    await yard.heal("n")
    await node.wait_connected(T_S)
    assert told == [False]


async def test_a_subscription_made_while_away_takes_effect_later(yard: Yard) -> None:
    node, controller = await yard.join("n"), await yard.join("c")
    await yard.cut("n")
    await until(lambda: not node.connected, "the loss being noticed")
    kept = await node.serve(INSTALL_BACKEND, answer, node="kept")
    dropped = await node.serve(INSTALL_BACKEND, answer, node="dropped")
    await dropped.unsubscribe()
    await yard.heal("n")
    await node.wait_connected(T_S)
    assert (await controller.call(INSTALL_BACKEND, InstallBackend(backend="x"), timeout_s=T_S, node="kept")).success
    with pytest.raises(Unreachable):
        await controller.call(INSTALL_BACKEND, InstallBackend(backend="x"), timeout_s=T_S, node="dropped")
    await kept.unsubscribe()


async def test_an_answer_finds_a_caller_who_was_away_meanwhile(yard: Yard) -> None:
    """The inbox outlives the connection: a long order is not lost because the controller's cable was."""
    node, controller = await yard.join("n"), await yard.join("c")
    begun, release = asyncio.Event(), asyncio.Event()

    async def slow(request: InstallBackend, tokens: Tokens) -> InstallReply:
        begun.set()
        await release.wait()
        return InstallReply(success=True)

    await node.serve(INSTALL_BACKEND, slow, node="n")
    order = asyncio.create_task(controller.call(INSTALL_BACKEND, InstallBackend(backend="x"), timeout_s=T_S, node="n"))
    await begun.wait()
    await yard.cut("c")
    await until(lambda: not controller.connected, "the loss being noticed")
    await yard.heal("c")
    await controller.wait_connected(T_S)
    release.set()
    assert (await order).success


async def test_silence_is_an_unknown_outcome_and_ends(yard: Yard) -> None:
    node, controller = await yard.join("n"), await yard.join("c")
    await node.serve(INSTALL_BACKEND, answer, node="n")
    await controller.call(INSTALL_BACKEND, InstallBackend(backend="x"), timeout_s=T_S, node="n")
    yard.freeze("n")
    with pytest.raises(OutcomeUnknown):
        await controller.call(INSTALL_BACKEND, InstallBackend(backend="x"), timeout_s=0.3, node="n")
    await yard.heal("n")

    async def answered() -> bool:
        try:
            await controller.call(INSTALL_BACKEND, InstallBackend(backend="x"), timeout_s=1, node="n")
        except (Unreachable, OutcomeUnknown):
            return False
        return True

    await until(answered, "an answer")


async def test_a_node_hears_and_tells_only_what_is_its_own(yard: Yard) -> None:
    a = await yard.join("a", permissions=node_permissions("a", reply_ttl_s=60))
    b = await yard.join("b", permissions=node_permissions("b", reply_ttl_s=60))
    controller = await yard.join("service", permissions=service_permissions("service", reply_ttl_s=60))
    heard: list[str] = []

    async def hear(message: BusHeartbeat, tokens: Tokens) -> None:
        heard.append(tokens["node"])

    await controller.subscribe(NODE_HEARTBEAT, hear, queue="controllers")
    await b.serve(INSTALL_BACKEND, answer, node="b")
    with pytest.raises(Denied, match=r"nodes\.b\.backend\.install"):
        await a.serve(INSTALL_BACKEND, answer, node="b")
    with pytest.raises(Denied):
        await a.subscribe(NODE_HEARTBEAT, hear)
    with pytest.raises(Denied, match=r"nodes\.b\.backend\.install"):
        await a.call(INSTALL_BACKEND, InstallBackend(backend="x"), timeout_s=T_S, node="b")
    await a.publish(NODE_HEARTBEAT, BusHeartbeat(), node="b")  # forged: goes nowhere
    await a.publish(NODE_HEARTBEAT, BusHeartbeat(), node="a")
    await until(lambda: heard, "a heartbeat")
    assert heard == ["a"]
    reply = await controller.call(INSTALL_BACKEND, InstallBackend(backend="x"), timeout_s=T_S, node="b")
    assert reply.success
