"""Events, on NATS and on its twin."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from corral.bus.api import Tokens
from corral.bus.handler_queue import QueueLimits
from corral.contract.messages.backends import INSTALL_PROGRESS, STOP_BACKEND, InstallProgress, StopBackend
from corral.contract.messages.hints import VIEW_CHANGED, ViewChanged
from corral.contract.messages.nodes import NODE_HEARTBEAT, STOP_NODE, BusHeartbeat
from corral.kit.errors import Invalid
from tests.support.buses import Yard
from tests.support.waiting import until


def raw(payload: bytes) -> Any:
    return msgspec.Raw(payload)


class Ear:
    """A handler that remembers."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    async def __call__(self, message: Any, tokens: Tokens) -> None:
        self.heard.append((message, dict(tokens)))

    async def has(self, count: int) -> None:
        await until(lambda: len(self.heard) >= count, f"message {count}")

    @property
    def versions(self) -> list[int]:
        return [message.row_version for message, _ in self.heard]


async def test_an_event_reaches_all_who_listen_with_its_tokens(yard: Yard) -> None:
    one, two, worker = await yard.join("c1"), await yard.join("c2"), await yard.join("n")
    ears = Ear(), Ear()
    await one.subscribe(INSTALL_PROGRESS, ears[0])
    await two.subscribe(INSTALL_PROGRESS, ears[1], node="n")
    sent = InstallProgress(op_id="o1", node_id="n", backend="vllm", percentage=47.5, phase="downloading")
    await worker.publish(INSTALL_PROGRESS, sent, node="n", op="o1")
    for ear in ears:
        await ear.has(1)
        assert ear.heard == [(sent, {"node": "n", "op": "o1"})]


async def test_a_subscription_is_in_force_when_subscribe_returns(yard: Yard) -> None:
    """No retry, no settling time: what is published next arrives."""
    listener, teller = await yard.join("l"), await yard.join("t")
    for number in range(20):
        ear = Ear()
        await listener.subscribe(NODE_HEARTBEAT, ear, node=f"n{number}")
        await teller.publish(NODE_HEARTBEAT, BusHeartbeat(boot_id="b"), node=f"n{number}")
        await ear.has(1)


async def test_messages_of_one_subject_arrive_in_order(yard: Yard) -> None:
    listener, teller = await yard.join("l"), await yard.join("t")
    ear = Ear()
    await listener.subscribe(VIEW_CHANGED, ear)
    for number in range(500):
        await teller.publish(VIEW_CHANGED, ViewChanged(kind="nodes", row_version=number))
    await until(lambda: len(ear.heard) == 500, "all messages")
    assert ear.versions == list(range(500))


async def test_in_a_queue_group_one_hears_each_message_and_others_hear_all(yard: Yard) -> None:
    first, second, teller = await yard.join("c1"), await yard.join("c2"), await yard.join("t")
    ears = Ear(), Ear(), Ear()
    await first.subscribe(VIEW_CHANGED, ears[0], queue="controllers")
    await second.subscribe(VIEW_CHANGED, ears[1], queue="controllers")
    await second.subscribe(VIEW_CHANGED, ears[2])
    for number in range(60):
        await teller.publish(VIEW_CHANGED, ViewChanged(kind="nodes", row_version=number))
    await until(lambda: len(ears[2].heard) == 60, "all messages")
    await until(lambda: len(ears[0].heard) + len(ears[1].heard) >= 60, "the group's messages")
    assert sorted(ears[0].versions + ears[1].versions) == list(range(60))
    assert ears[0].heard
    assert ears[1].heard


async def test_two_subscriptions_of_one_participant_each_hear_everything(yard: Yard) -> None:
    listener, teller = await yard.join("l"), await yard.join("t")
    ears = Ear(), Ear()
    for ear in ears:
        await listener.subscribe(VIEW_CHANGED, ear)
    for number in range(10):
        await teller.publish(VIEW_CHANGED, ViewChanged(kind="nodes", row_version=number))
    for ear in ears:
        await ear.has(10)
        assert ear.versions == list(range(10))


async def test_a_stop_that_cannot_be_read_stops_nothing_but_an_empty_one_stops_all(yard: Yard) -> None:
    """The contract's sharpest corner: garbage must never be taken for "stop everything"."""
    worker, controller = await yard.join("n"), await yard.join("c")
    ear = Ear()
    await worker.subscribe(STOP_BACKEND, ear, node="n")
    for payload in (b'{"backend":', b"[]", b"7", b'{"backend":{}}', b"\x00"):
        await controller.publish(STOP_BACKEND, raw(payload), node="n")
    await controller.publish(STOP_BACKEND, raw(b"null"), node="n")
    await controller.publish(STOP_BACKEND, raw(b""), node="n")
    await controller.publish(STOP_BACKEND, StopBackend(backend="vllm", force=True), node="n")
    await until(lambda: len(ear.heard) == 3, "three stops")
    assert [message for message, _ in ear.heard] == [
        StopBackend(),
        StopBackend(),
        StopBackend(backend="vllm", force=True),
    ]


async def test_whoever_wants_the_bytes_gets_every_payload(yard: Yard) -> None:
    worker, controller = await yard.join("n"), await yard.join("c")
    ear = Ear()
    await worker.subscribe_bytes(STOP_NODE, ear, node="n")
    for payload in (b"", b"null", b"{oops"):
        await controller.publish(STOP_NODE, raw(payload), node="n")
    await until(lambda: len(ear.heard) == 3, "three payloads")
    assert ear.heard == [(payload, {"node": "n"}) for payload in (b"", b"null", b"{oops")]


async def test_a_handler_that_fails_hears_the_next_message(yard: Yard) -> None:
    listener, teller = await yard.join("l"), await yard.join("t")
    heard: list[int] = []

    async def moody(message: ViewChanged, tokens: Tokens) -> None:
        if message.row_version == 1:
            raise RuntimeError("boom")
        if message.row_version == 2:
            raise asyncio.CancelledError
        heard.append(message.row_version)

    await listener.subscribe(VIEW_CHANGED, moody)
    for number in range(5):
        await teller.publish(VIEW_CHANGED, ViewChanged(kind="nodes", row_version=number))
    await until(lambda: heard == [0, 3, 4], "the messages around the failures")


async def test_a_slow_consumer_loses_its_oldest_and_delays_nobody(yard: Yard) -> None:
    listener, teller = await yard.join("l", limits=QueueLimits(messages=10)), await yard.join("t")
    release = asyncio.Event()
    seen: list[int] = []

    async def slow(message: ViewChanged, tokens: Tokens) -> None:
        await release.wait()
        seen.append(message.row_version)

    quick = Ear()
    subscription = await listener.subscribe(VIEW_CHANGED, slow)
    await listener.subscribe(NODE_HEARTBEAT, quick)
    for number in range(100):
        await teller.publish(VIEW_CHANGED, ViewChanged(kind="nodes", row_version=number))
        await teller.publish(NODE_HEARTBEAT, BusHeartbeat(boot_id=str(number)), node="n")
        await quick.has(number + 1)
    assert seen == []
    release.set()
    await until(lambda: len(seen) == 11, "what was kept")
    assert seen == [0, *range(90, 100)]  # the one in hand, then the ten newest
    assert subscription.dropped == 89


async def test_waiting_messages_are_bounded_by_their_size_too(yard: Yard) -> None:
    limits = QueueLimits(messages=1000, payload_bytes=100_000)
    listener, teller = await yard.join("l", limits=limits), await yard.join("t")
    begun, release = asyncio.Event(), asyncio.Event()
    seen: list[str] = []

    async def slow(message: ViewChanged, tokens: Tokens) -> None:
        begun.set()
        await release.wait()
        seen.append(message.kind)

    subscription = await listener.subscribe(VIEW_CHANGED, slow)
    await teller.publish(VIEW_CHANGED, ViewChanged(kind="0"))
    await begun.wait()
    for number in range(1, 50):
        await teller.publish(VIEW_CHANGED, ViewChanged(kind=str(number), id="x" * 20_000))
    await until(lambda: subscription.dropped == 45, "the overflow")
    release.set()
    await until(lambda: len(seen) == 5, "what was kept")
    assert seen == ["0", "46", "47", "48", "49"]


async def test_after_unsubscribe_no_handler_starts(yard: Yard) -> None:
    listener, teller = await yard.join("l"), await yard.join("t")
    ended, going = Ear(), Ear()
    subscription = await listener.subscribe(VIEW_CHANGED, ended)
    await listener.subscribe(VIEW_CHANGED, going)
    await teller.publish(VIEW_CHANGED, ViewChanged(kind="nodes", row_version=1))
    await until(lambda: ended.heard and going.heard, "the first message")
    await subscription.unsubscribe()
    await teller.publish(VIEW_CHANGED, ViewChanged(kind="nodes", row_version=2))
    await until(lambda: len(going.heard) == 2, "the second message")
    assert ended.versions == [1]


async def test_an_event_too_large_is_refused_in_words(yard: Yard) -> None:
    teller = await yard.join("t")
    with pytest.raises(Invalid, match="over the limit"):
        await teller.publish(VIEW_CHANGED, ViewChanged(kind="x" * 600_000))


async def test_an_event_nobody_hears_is_no_error(yard: Yard) -> None:
    teller = await yard.join("t")
    await teller.publish(VIEW_CHANGED, ViewChanged(kind="nodes"))


async def test_a_token_no_server_would_take_is_refused_before_it_breaks_the_connection(yard: Yard) -> None:
    bus = await yard.join("t")
    with pytest.raises(ValueError, match="empty token"):
        await bus.publish(NODE_HEARTBEAT, BusHeartbeat(), node="")
    for token in ("a\rb", "a\x00b", "a\u2028b", "a\x7f"):
        with pytest.raises(Invalid, match="is not a subject"):
            await bus.publish(NODE_HEARTBEAT, BusHeartbeat(), node=token)
        with pytest.raises(Invalid, match="is not a subject"):
            await bus.subscribe(NODE_HEARTBEAT, Ear(), node=token)
    with pytest.raises(Invalid, match="is not a subject"):
        await bus.subscribe(NODE_HEARTBEAT, Ear(), node="")
    ear = Ear()
    await bus.subscribe(NODE_HEARTBEAT, ear)
    await bus.publish(NODE_HEARTBEAT, BusHeartbeat(), node="a/b:c")
    await ear.has(1)
    assert bus.connected
