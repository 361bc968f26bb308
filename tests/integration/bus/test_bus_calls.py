"""Calls, on NATS and on its twin."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import msgspec
import pytest

from corral.bus.api import Bus, Tokens
from corral.bus.handler_queue import QueueLimits
from corral.contract.codec import Message
from corral.contract.messages.backends import (
    INSTALL_BACKEND,
    LIST_BACKENDS,
    BackendList,
    InstallBackend,
    InstallReply,
    ListBackends,
    NodeBackend,
)
from corral.contract.messages.models import LIST_RUNNING_MODELS, ListRunningModels, RunningModels
from corral.contract.subjects import call
from corral.kit.errors import Conflict, Failed, Invalid, OutcomeUnknown, Unreachable
from tests.support.buses import Yard
from tests.support.waiting import until

T_S = 30.0


def raw(payload: bytes) -> Any:
    """A message that goes over the wire as these very bytes."""
    return msgspec.Raw(payload)


async def answer_backend(request: InstallBackend, tokens: Tokens) -> InstallReply:
    return InstallReply(success=True, address=f"{tokens['node']}/{request.backend}")


async def test_a_call_is_answered_by_the_node_it_names(yard: Yard) -> None:
    controller, one, two = await yard.join("c"), await yard.join("n1"), await yard.join("n2")
    await one.serve(INSTALL_BACKEND, answer_backend, node="n1")
    await two.serve(INSTALL_BACKEND, answer_backend, node="n2")
    reply = await controller.call(INSTALL_BACKEND, InstallBackend(backend="vllm"), timeout_s=T_S, node="n2")
    assert reply == InstallReply(success=True, address="n2/vllm")


async def test_a_token_is_sanitised_on_both_sides(yard: Yard) -> None:
    controller, worker = await yard.join("c"), await yard.join("n")
    await worker.serve(INSTALL_BACKEND, answer_backend, node="a.b*c")
    reply = await controller.call(INSTALL_BACKEND, InstallBackend(backend="x"), timeout_s=T_S, node="a.b*c")
    assert reply.address == "a-b-c/x"


async def test_no_responders_is_unreachable_at_once(yard: Yard) -> None:
    controller = await yard.join("c")
    with pytest.raises(Unreachable, match=r"nodes\.gone\.backend\.install"):
        await controller.call(INSTALL_BACKEND, InstallBackend(backend="x"), timeout_s=30, node="gone")


async def test_no_answer_in_time_is_an_unknown_outcome_and_a_late_one_harms_nobody(yard: Yard) -> None:
    controller, worker = await yard.join("c"), await yard.join("n")
    release = asyncio.Event()

    async def slow(request: InstallBackend, tokens: Tokens) -> InstallReply:
        if request.backend == "slow":
            await release.wait()
        return InstallReply(success=True, address=request.backend)

    await worker.serve(INSTALL_BACKEND, slow, concurrency=2, node="n")
    with pytest.raises(OutcomeUnknown):
        await controller.call(INSTALL_BACKEND, InstallBackend(backend="slow"), timeout_s=0.1, node="n")
    release.set()
    for _ in range(3):
        reply = await controller.call(INSTALL_BACKEND, InstallBackend(backend="now"), timeout_s=T_S, node="n")
        assert reply.address == "now"


@pytest.mark.parametrize("payload", [b"{oops", b"[]", b'"text"', b'{"backend":5}', b"\xff\xfe"])
async def test_a_request_that_cannot_be_read_is_answered_so_and_reaches_no_handler(yard: Yard, payload: bytes) -> None:
    controller, worker = await yard.join("c"), await yard.join("n")
    seen: list[InstallBackend] = []

    async def note(request: InstallBackend, tokens: Tokens) -> InstallReply:
        seen.append(request)
        return InstallReply(success=True)

    await worker.serve(INSTALL_BACKEND, note, node="n")
    reply = await controller.call(INSTALL_BACKEND, raw(payload), timeout_s=T_S, node="n")
    assert not reply.success
    assert reply.error.startswith("invalid request: ")
    assert seen == []


@pytest.mark.parametrize("payload", [b"", b"null", b"{}", b'{"backend":null,"unknown":1}'])
async def test_empty_null_and_braces_are_the_same_request(yard: Yard, payload: bytes) -> None:
    controller, worker = await yard.join("c"), await yard.join("n")
    await worker.serve(INSTALL_BACKEND, answer_backend, node="n")
    reply = await controller.call(INSTALL_BACKEND, raw(payload), timeout_s=T_S, node="n")
    assert reply == InstallReply(success=True, address="n/")


async def test_an_answer_that_cannot_be_read_is_a_failure(yard: Yard) -> None:
    controller, worker = await yard.join("c"), await yard.join("n")

    async def garble(request: InstallBackend, tokens: Tokens) -> InstallReply:
        return cast(InstallReply, raw(b'{"success":"perhaps"}'))

    await worker.serve(INSTALL_BACKEND, garble, node="n")
    with pytest.raises(Failed, match="cannot be read"):
        await controller.call(INSTALL_BACKEND, InstallBackend(backend="x"), timeout_s=T_S, node="n")


@pytest.mark.parametrize("payload", [b'{"backends":null}', b'{"backends":[]}', b"{}", b"null"])
async def test_null_arrays_are_empty_arrays(yard: Yard, payload: bytes) -> None:
    controller, worker = await yard.join("c"), await yard.join("n")

    async def nothing(request: ListBackends, tokens: Tokens) -> BackendList:
        return cast(BackendList, raw(payload))

    await worker.serve(LIST_BACKENDS, nothing, node="n")
    assert (await controller.call(LIST_BACKENDS, ListBackends(), timeout_s=T_S, node="n")).backends == ()


async def test_large_lists_pass_and_larger_ones_are_refused_in_words(yard: Yard) -> None:
    controller, worker = await yard.join("c"), await yard.join("n")
    count = 1

    async def many(request: ListBackends, tokens: Tokens) -> BackendList:
        return BackendList(backends=tuple(NodeBackend(name="x" * 1000) for _ in range(count)))

    await worker.serve(LIST_BACKENDS, many, node="n")
    count = 400
    assert len((await controller.call(LIST_BACKENDS, ListBackends(), timeout_s=T_S, node="n")).backends) == 400
    count = 600
    reply = await controller.call(LIST_BACKENDS, ListBackends(), timeout_s=T_S, node="n")
    assert reply.backends == ()
    assert "over 524288" in reply.error
    order = InstallBackend(backend="x" * 600_000)
    with pytest.raises(Invalid, match="over the limit of 524288"):
        await controller.call(INSTALL_BACKEND, order, timeout_s=T_S, node="n")


async def test_a_handler_that_fails_answers_and_lives_on(yard: Yard, caplog: pytest.LogCaptureFixture) -> None:
    controller, worker = await yard.join("c"), await yard.join("n")

    async def moody(request: InstallBackend, tokens: Tokens) -> InstallReply:
        if request.backend == "crash":
            raise RuntimeError("details that are nobody's business")
        if request.backend == "conflict":
            raise Conflict("slot still stopping")
        return InstallReply(success=True)

    await worker.serve(INSTALL_BACKEND, moody, node="n")

    async def order(backend: str) -> InstallReply:
        return await controller.call(INSTALL_BACKEND, InstallBackend(backend=backend), timeout_s=T_S, node="n")

    assert await order("crash") == InstallReply(success=False, error="internal error")
    assert await order("conflict") == InstallReply(success=False, error="slot still stopping")
    assert await order("fine") == InstallReply(success=True)


async def test_a_reply_that_cannot_be_encoded_is_the_contracts_literal(yard: Yard) -> None:
    controller, worker = await yard.join("c"), await yard.join("n")

    async def broken(request: ListRunningModels, tokens: Tokens) -> RunningModels:
        return RunningModels(error=cast(str, object()))

    await worker.serve(LIST_RUNNING_MODELS, broken, node="n")
    reply = await controller.call(LIST_RUNNING_MODELS, ListRunningModels(), timeout_s=T_S, node="n")
    assert reply == RunningModels(error="internal marshal error")


class Plain(Message, frozen=True):
    done: bool = False


async def test_a_reply_without_an_error_field_is_not_faked(yard: Yard) -> None:
    """Zero values could be read as an answer; silence cannot."""
    ask = call("corral.test.plain", Plain, Plain)
    caller, server = await yard.join("c"), await yard.join("n")

    async def crash(request: Plain, tokens: Tokens) -> Plain:
        raise RuntimeError

    await server.serve(ask, crash)
    with pytest.raises(OutcomeUnknown):
        await caller.call(ask, Plain(), timeout_s=0.2)


async def serve_and_count(bus: Bus, concurrency: int, release: asyncio.Event) -> list[int]:
    """Handlers that run at once: the list's maximum is the answer."""
    running: list[int] = [0]

    async def hold(request: InstallBackend, tokens: Tokens) -> InstallReply:
        running.append(running[-1] + 1)
        await release.wait()
        running.append(running[-1] - 1)
        return InstallReply(success=True)

    await bus.serve(INSTALL_BACKEND, hold, concurrency=concurrency, node="n")
    return running


@pytest.mark.parametrize(("concurrency", "at_once"), [(1, 1), (3, 3)])
async def test_no_more_handlers_run_at_once_than_asked_for(yard: Yard, concurrency: int, at_once: int) -> None:
    controller, worker = await yard.join("c"), await yard.join("n")
    release = asyncio.Event()
    running = await serve_and_count(worker, concurrency, release)
    async with asyncio.TaskGroup() as group:
        calls = [
            group.create_task(controller.call(INSTALL_BACKEND, InstallBackend(backend="x"), timeout_s=T_S, node="n"))
            for _ in range(8)
        ]
        await until(lambda: max(running) == at_once, "the expected concurrency")
        release.set()
    assert all(each.result().success for each in calls)
    assert max(running) == at_once


async def test_one_slow_subject_delays_no_other(yard: Yard) -> None:
    controller, worker = await yard.join("c"), await yard.join("n")
    release = asyncio.Event()
    await serve_and_count(worker, 1, release)

    async def nothing(request: ListBackends, tokens: Tokens) -> BackendList:
        return BackendList()

    await worker.serve(LIST_BACKENDS, nothing, node="n")
    slow = asyncio.create_task(controller.call(INSTALL_BACKEND, InstallBackend(backend="x"), timeout_s=T_S, node="n"))
    assert await controller.call(LIST_BACKENDS, ListBackends(), timeout_s=T_S, node="n") == BackendList()
    assert not slow.done()
    release.set()
    assert (await slow).success


async def test_a_full_queue_tells_the_caller_so(yard: Yard) -> None:
    controller, worker = await yard.join("c"), await yard.join("n", limits=QueueLimits(messages=2))
    release = asyncio.Event()
    running = await serve_and_count(worker, 1, release)

    async def order() -> InstallReply:
        return await controller.call(INSTALL_BACKEND, InstallBackend(backend="x"), timeout_s=T_S, node="n")

    async with asyncio.TaskGroup() as group:
        first = group.create_task(order())
        await until(lambda: max(running) == 1, "the first one running")
        calls = [group.create_task(order()) for _ in range(9)]
        # Two wait: the other seven are told.
        await until(lambda: sum(each.done() for each in calls) == 7, "seven refusals")
        assert max(running) == 1
        release.set()
    replies = [each.result() for each in calls]
    assert first.result().success
    assert sum(reply.success for reply in replies) == 2
    assert {reply.error for reply in replies if not reply.success} == {"busy: too many requests are waiting"}


async def test_many_calls_at_once_each_get_their_own_answer(yard: Yard) -> None:
    controller, worker = await yard.join("c"), await yard.join("n")
    await worker.serve(INSTALL_BACKEND, answer_backend, concurrency=16, node="n")
    orders = [InstallBackend(backend=str(number)) for number in range(300)]
    replies = await asyncio.gather(
        *(controller.call(INSTALL_BACKEND, order, timeout_s=T_S, node="n") for order in orders)
    )
    assert [reply.address for reply in replies] == [f"n/{number}" for number in range(300)]


async def test_after_unsubscribe_nobody_listens(yard: Yard) -> None:
    controller, worker = await yard.join("c"), await yard.join("n")
    served = await worker.serve(INSTALL_BACKEND, answer_backend, node="n")
    await controller.call(INSTALL_BACKEND, InstallBackend(backend="x"), timeout_s=T_S, node="n")
    await served.unsubscribe()
    await served.unsubscribe()  # twice is fine

    async def refused() -> bool:
        try:
            await controller.call(INSTALL_BACKEND, InstallBackend(backend="x"), timeout_s=0.2, node="n")
        except Unreachable:
            return True
        except OutcomeUnknown:
            pass  # the server has not heard of it yet
        return False

    await until(refused, "nobody to listen")


async def test_a_cancelled_caller_takes_nobody_with_it(yard: Yard) -> None:
    controller, worker = await yard.join("c"), await yard.join("n")
    release = asyncio.Event()
    running = await serve_and_count(worker, 4, release)
    calls = [
        asyncio.create_task(controller.call(INSTALL_BACKEND, InstallBackend(backend="x"), timeout_s=T_S, node="n"))
        for _ in range(2)
    ]
    calls[0].cancel()  # while the inbox is still being set up for both
    await until(lambda: max(running) >= 1, "a running handler")
    release.set()
    assert (await calls[1]).success
    assert calls[0].cancelled()


async def test_a_handler_may_call_others_and_end_its_own_subscription(yard: Yard) -> None:
    controller, worker, other = await yard.join("c"), await yard.join("n"), await yard.join("o")
    await other.serve(INSTALL_BACKEND, answer_backend, node="o")

    async def once(request: InstallBackend, tokens: Tokens) -> InstallReply:
        await served.unsubscribe()
        return await worker.call(INSTALL_BACKEND, request, timeout_s=T_S, node="o")

    served = await worker.serve(INSTALL_BACKEND, once, node="n")
    reply = await controller.call(INSTALL_BACKEND, InstallBackend(backend="x"), timeout_s=T_S, node="n")
    assert reply.address == "o/x"
