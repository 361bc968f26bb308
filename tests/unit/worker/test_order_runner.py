"""Outcomes on the disk, and orders that are carried out once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from corral.contract.messages.backends import BackendResult
from corral.contract.messages.replicas import ReplicaResult
from corral.kit.errors import Failed
from corral.worker.agent.orders.runner import OrderKey, OrderRun, OrderRunner, Outcome, Outcomes
from tests.support.manual_clock import ManualClock
from tests.support.waiting import until


def key(op: str = "op", attempt: int = 1, kind: str = "install", about: str = "b") -> OrderKey:
    return OrderKey(kind, op, attempt, about)


def result(op: str = "op", attempt: int = 1, *, error: str = "") -> BackendResult:
    return BackendResult(op_id=op, attempt=attempt, node_id="n", backend="b", success=not error, error=error)


async def test_what_was_added_is_there_for_the_next_worker(tmp_path: Path) -> None:
    clock = ManualClock()
    before = Outcomes(tmp_path / "o.json", clock)
    before.load()
    await before.add(key(), result())
    await before.add(key("r", kind="replica.start", about="p"), ReplicaResult("r", 1, True, "p"))
    after = Outcomes(tmp_path / "o.json", clock)
    after.load()
    assert after.find(key()) is not None
    assert after.find(key()) == before.find(key())
    found = after.find(key("r", kind="replica.start", about="p"))
    assert found is not None
    assert found.replica == ReplicaResult("r", 1, True, "p")
    assert after.find(key(attempt=2)) is None
    assert after.find(key(about="other")) is None
    assert after.find(key(kind="upgrade")) is None


async def test_the_oldest_go_first(tmp_path: Path) -> None:
    outcomes = Outcomes(tmp_path / "o.json", ManualClock(), keep=3)
    for number in range(5):
        await outcomes.add(key(f"op-{number}"), result(f"op-{number}"))
    again = Outcomes(tmp_path / "o.json", ManualClock(), keep=3)
    again.load()
    for each in (outcomes, again):
        assert [row.backend.op_id for row in each.recent() if row.backend] == ["op-2", "op-3", "op-4"]


async def test_heartbeats_tell_those_of_the_last_minutes(tmp_path: Path) -> None:
    clock = ManualClock()
    outcomes = Outcomes(tmp_path / "o.json", clock, fresh_s=600)
    await outcomes.add(key("old"), result("old"))
    clock.advance(599)
    await outcomes.add(key("new"), result("new"))
    assert len(outcomes.recent()) == 2
    clock.advance(2)
    assert [row.backend.op_id for row in outcomes.recent() if row.backend] == ["new"]
    assert outcomes.find(key("old")) is not None


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"outcomes":[{"kind":"install"}]}', b"\xff\xfe"])
async def test_a_damaged_file_costs_its_content_only(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "o.json").write_bytes(content)
    outcomes = Outcomes(tmp_path / "o.json", ManualClock())
    outcomes.load()
    assert outcomes.recent() == ()
    await outcomes.add(key(), result())
    again = Outcomes(tmp_path / "o.json", ManualClock())
    again.load()
    assert again.find(key()) is not None


async def test_a_disk_that_refuses_is_no_reason_to_forget(tmp_path: Path) -> None:
    outcomes = Outcomes(tmp_path / "nowhere" / "o.json", ManualClock())
    await outcomes.add(key(), result())
    assert outcomes.find(key()) is not None


async def test_long_errors_keep_both_ends(tmp_path: Path) -> None:
    outcomes = Outcomes(tmp_path / "o.json", ManualClock())
    outcome = await outcomes.add(key(), result(error="begin" + "x" * 100_000 + "end"))
    assert outcome.backend is not None
    assert len(outcome.backend.error) < 5000
    assert outcome.backend.error.startswith("begin")
    assert outcome.backend.error.endswith("end")


class Reported:
    def __init__(self) -> None:
        self.outcomes: list[Outcome] = []

    async def __call__(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)


class Work:
    """Counts how often it was begun, and ends when the test says so."""

    def __init__(self) -> None:
        self.begun = 0
        self.over = asyncio.Event()
        self.undone = 0

    async def __call__(self, run: OrderRun) -> BackendResult:
        self.begun += 1
        try:
            await self.over.wait()
        except asyncio.CancelledError:
            self.undone += 1
            raise
        return result()


@pytest.fixture
def reported() -> Reported:
    return Reported()


@pytest.fixture
async def runner(tmp_path: Path, reported: Reported) -> AsyncIterator[OrderRunner]:
    async with OrderRunner(Outcomes(tmp_path / "o.json", ManualClock()), reported) as opened:
        yield opened


def cancelled() -> BackendResult:
    return BackendResult(op_id="op", attempt=1, node_id="n", backend="b", success=False, cancelled=True)


async def test_a_repeated_order_is_carried_out_once_and_reported_again(runner: OrderRunner, reported: Reported) -> None:
    work = Work()
    for _ in range(2):
        runner.accept(key(), work, cancelled=cancelled)
    assert runner.running() == (key(),)
    work.over.set()
    await until(lambda: reported.outcomes)
    runner.accept(key(), work, cancelled=cancelled)
    await until(lambda: len(reported.outcomes) == 2)
    assert (work.begun, runner.running()) == (1, ())
    assert reported.outcomes[0] == reported.outcomes[1]


async def test_a_cancelled_order_has_an_outcome(runner: OrderRunner, reported: Reported) -> None:
    work = Work()
    runner.accept(key(), work, cancelled=cancelled)
    await until(lambda: work.begun)
    assert runner.cancel("op", "other") is False
    assert runner.cancel("op", "b") is True
    await until(lambda: reported.outcomes)
    assert reported.outcomes[0].backend == cancelled()
    assert work.undone == 1
    assert runner.cancel("op", "b") is False


async def test_an_order_cancelled_before_it_began_has_an_outcome(runner: OrderRunner, reported: Reported) -> None:
    """Its task never ran, so it stayed in the list of running orders for ever (seed 86)."""
    work = Work()
    runner.accept(key(), work, cancelled=cancelled)
    assert runner.cancel("op", "b") is True
    await until(lambda: reported.outcomes)
    assert reported.outcomes[0].backend == cancelled()
    assert (work.begun, runner.running()) == (0, ())


async def test_a_committed_order_cannot_be_cancelled(runner: OrderRunner, reported: Reported) -> None:
    work = Work()

    async def committed(run: OrderRun) -> BackendResult:
        run.commit()
        return await work(run)

    runner.accept(key(), committed, cancelled=cancelled)
    await until(lambda: work.begun)
    assert runner.cancel("op", "b") is True
    work.over.set()
    await until(lambda: reported.outcomes)
    assert reported.outcomes[0].backend == result()


async def test_an_order_that_ends_with_the_worker_has_no_outcome(tmp_path: Path) -> None:
    reported, work, outcomes = Reported(), Work(), Outcomes(tmp_path / "o.json", ManualClock())
    async with OrderRunner(outcomes, reported) as runner:
        runner.accept(key(), work, cancelled=cancelled)
        await until(lambda: work.begun)
    assert (work.undone, reported.outcomes, outcomes.find(key())) == (1, [], None)


async def test_detached_work_continues_without_its_caller(runner: OrderRunner) -> None:
    over, done = asyncio.Event(), []

    async def work() -> None:
        await over.wait()
        done.append(True)

    waiting = asyncio.ensure_future(runner.run_detached(work()))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    over.set()
    await until(lambda: done)


async def test_the_caller_of_detached_work_gets_its_error(runner: OrderRunner) -> None:
    async def work() -> None:
        raise Failed("no luck")

    with pytest.raises(Failed, match="no luck"):
        await runner.run_detached(work())
