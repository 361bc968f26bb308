"""Progress (docs/reference/wire/progress.md#publishing): at once, then at most one in 250 ms, the latest, and always a
last."""

from __future__ import annotations

import asyncio
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.blobs.progress import Progress
from corral.contract.codec import encode
from corral.contract.messages.backends import InstallProgress, Phase
from corral.kit.errors import Unavailable
from corral.worker.installer.progress import PhaseScale, ProgressPublisher, ProgressSubject, Window, forward_only
from tests.support.manual_clock import ManualClock
from tests.support.waiting import until

DOWN, EXTRACT, VERIFY = Phase.DOWNLOADING, Phase.EXTRACTING, Phase.VERIFYING
RESOLVE, START = Phase.RESOLVING, Phase.STARTING


def test_the_first_goes_out_at_once_and_the_rest_waits_as_one() -> None:
    window: Window[int] = Window(0.25)
    seen: list[object] = [window.tick(1, 10.0), window.due_s]
    assert seen == [1, None]
    seen = [window.tick(2, 10.1), window.tick(3, 10.2), window.due_s]
    assert seen == [None, None, 10.25]
    seen = [window.close(10.25), window.due_s]
    assert seen == [3, None]
    assert window.close(10.3) is None  # nothing is pending: nothing is sent


def test_after_a_quiet_window_it_is_at_once_again() -> None:
    window: Window[int] = Window(0.25)
    assert window.tick(1, 10.0) == 1
    assert window.tick(2, 10.25) == 2
    assert window.tick(3, 99.0) == 3


def test_a_trailing_one_opens_a_window_of_its_own() -> None:
    window: Window[int] = Window(0.25)
    window.tick(1, 10.0)
    window.tick(2, 10.1)
    assert window.close(10.25) == 2
    assert window.tick(3, 10.4) is None
    assert window.due_s == 10.5


@given(st.lists(st.tuples(st.floats(0.001, 1.0), st.integers()), min_size=1, max_size=30))
def test_never_more_than_one_in_a_window_and_the_last_is_always_sent(ticks: list[tuple[float, int]]) -> None:
    window: Window[int] = Window(0.25)
    now, sent = 0.0, list[tuple[float, int]]()
    for step, value in ticks:
        later = now + step
        if (due := window.due_s) is not None and due <= later and (event := window.close(due)) is not None:
            sent.append((due, event))
        now = later
        if (event := window.tick(value, now)) is not None:
            sent.append((now, event))
    in_time = list(sent)
    if (event := window.close(now)) is not None:
        sent.append((now, event))
    assert sent[-1][1] == ticks[-1][1]
    gaps = [after[0] - before[0] for before, after in itertools.pairwise(in_time)]
    assert all(gap >= 0.25 - 1e-9 for gap in gaps)


@pytest.mark.parametrize(
    ("before", "now", "told"),
    [
        (None, Progress(DOWN, "a", 5, 10), Progress(DOWN, "a", 5, 10)),
        (Progress(DOWN, "a", 5, 10), Progress(DOWN, "b", 3, 10), Progress(DOWN, "b", 5, 10)),
        (Progress(DOWN, "a", 5, 10), Progress(DOWN, "a", 7, 0), Progress(DOWN, "a", 7, 10)),
        (Progress(DOWN, "a", 5, 10), Progress(EXTRACT, "a", 0, 10), Progress(EXTRACT, "a", 0, 10)),
        # a second source begins anew: nobody's bar goes back for that
        (Progress(DOWN, "a", 5, 10), Progress(Phase.RESOLVING, "b"), Progress(DOWN, "a", 5, 10)),
        (Progress(EXTRACT, "a", 5, 10, 3.0), Progress(DOWN, "b", 1, 9, 7.0), Progress(EXTRACT, "a", 5, 10, 7.0)),
        (Progress(DOWN, "a", 12, 12), Progress(DOWN, "b", 3, 10), Progress(DOWN, "b", 12, 12)),
    ],
)
def test_progress_never_goes_back(before: Progress | None, now: Progress, told: Progress) -> None:
    assert forward_only(before, now) == told


@pytest.mark.parametrize(
    ("told", "shown"),
    [
        # from a registry, a URL or a package index
        (
            [
                (RESOLVE, 0, 0),
                (DOWN, 1, 3),
                (DOWN, 3, 3),
                (VERIFY, 3, 3),
                (EXTRACT, 0, 9),
                (EXTRACT, 3, 9),
                (START, 0, 0),
            ],
            [0.0, 20.0, 60.0, 65.0, 65.0, 75.0, 95.0],
        ),
        # a folder or an archive on the worker's disk: nothing is downloaded
        ([(VERIFY, 1, 2), (VERIFY, 2, 2), (EXTRACT, 1, 2), (EXTRACT, 2, 2)], [32.5, 65.0, 80.0, 95.0]),
        # sizes that are unknown leave their part to the next phase
        ([(DOWN, 5, 0), (DOWN, 9, 0), (EXTRACT, 1, 5), (EXTRACT, 5, 5), (START, 0, 0)], [0.0, 0.0, 19.0, 95.0, 95.0]),
        # files that came with the order; a build that is there already
        ([(RESOLVE, 0, 0), (EXTRACT, 0, 0), (START, 0, 0)], [0.0, 0.0, 95.0]),
        ([(RESOLVE, 0, 0), (START, 0, 0)], [0.0, 95.0]),
        # more than was said to come, and a size that turns out larger
        ([(DOWN, 11, 10), (DOWN, 12, 24)], [60.0, 60.0]),
    ],
)
def test_one_scale_over_the_phases(told: list[tuple[Phase, int, int]], shown: list[float]) -> None:
    scale = PhaseScale()
    assert [scale.at(Progress(phase, "a", current, total)) for phase, current, total in told] == shown


@given(st.lists(st.tuples(st.sampled_from(Phase), st.integers(0, 50), st.integers(0, 50)), max_size=40))
def test_the_scale_never_goes_back_nor_reaches_the_end(told: list[tuple[Phase, int, int]]) -> None:
    scale, last, shown = PhaseScale(), None, [0.0]
    for phase, current, total in told:
        last = forward_only(last, Progress(phase, "a", current, total))
        shown.append(scale.at(last))
    assert shown == sorted(shown)
    assert shown[-1] <= 99.0


@given(st.lists(st.sampled_from([RESOLVE, DOWN, VERIFY]), max_size=3), st.integers(0, 10))
def test_while_extracting_every_percent_of_it_is_seen(before: list[Phase], downloaded: int) -> None:
    scale, last = PhaseScale(), None
    for phase in before:
        last = forward_only(last, Progress(phase, "a", downloaded, 10))
        scale.at(last)
    shown = [scale.at(Progress(EXTRACT, "a", done, 100)) for done in range(101)]
    assert all(earlier < later for earlier, later in itertools.pairwise(shown))
    assert shown[-1] == 95.0


class Bus:
    def __init__(self) -> None:
        self.sent: list[InstallProgress] = []
        self.down = False

    async def publish(self, event: InstallProgress) -> None:
        if self.down:
            raise Unavailable("the bus is not connected")
        self.sent.append(event)


ORDER = ProgressSubject("op 1", "node.1", "llama-cpp", 2)


async def test_an_event_on_the_wire() -> None:
    bus = Bus()
    async with ProgressPublisher(ORDER, bus.publish, ManualClock()) as publisher:
        publisher.tell(Progress(DOWN, "layer", 412 << 20, 2254857830, 1000.04))
    assert encode(bus.sent[0]) == (
        b'{"op_id":"op 1","node_id":"node.1","backend":"llama-cpp","file_name":"layer","current":"412.0 MiB",'
        b'"total":"2.1 GiB","percentage":11.5,"phase":"downloading","attempt":2,"seq":1,'
        b'"current_bytes":432013312,"total_bytes":2254857830,"rate":1000.0}'
    )


async def test_the_percentage_never_goes_back_from_phase_to_phase() -> None:
    """A LocalAI controller shows the latest event as it is."""
    bus, clock = Bus(), ManualClock()
    async with ProgressPublisher(ORDER, bus.publish, clock) as publisher:
        for progress in (Progress(DOWN, "a", 5, 10), Progress(DOWN, "a", 10, 10), Progress(EXTRACT, "a", 1, 10)):
            publisher.tell(progress)
            clock.advance(1.0)
            await asyncio.sleep(0)
        publisher.tell(Progress(Phase.STARTING))
    assert [(event.phase, event.percentage) for event in bus.sent] == [
        ("downloading", 30.0),
        ("downloading", 60.0),
        ("extracting", 63.5),
        ("starting", 95.0),
    ]


async def test_the_last_event_is_out_before_the_work_is_over() -> None:
    bus, clock = Bus(), ManualClock()
    async with ProgressPublisher(ORDER, bus.publish, clock) as publisher:
        publisher.tell(Progress(DOWN, "a", 1, 10))
        for done in range(2, 11):
            publisher.tell(Progress(DOWN, "a", done, 10))
    assert [(event.seq, event.current_bytes) for event in bus.sent] == [(1, 1), (2, 10)]


async def test_it_is_out_after_a_failure_too() -> None:
    bus = Bus()
    publisher = ProgressPublisher(ORDER, bus.publish, ManualClock())

    async def fail() -> None:
        async with publisher:
            publisher.tell(Progress(DOWN, "a", 1, 10))
            publisher.tell(Progress(VERIFY, "a", 10, 10))
            raise KeyError("x")

    with pytest.raises(KeyError):
        await fail()
    assert [event.phase for event in bus.sent] == ["downloading", "verifying"]
    assert publisher.phase == "verifying"


async def test_nothing_pending_nothing_sent_and_nothing_after_the_end() -> None:
    bus = Bus()
    async with ProgressPublisher(ORDER, bus.publish, ManualClock()) as publisher:
        publisher.tell(Progress(DOWN, "a", 1, 10))
    publisher.tell(Progress(DOWN, "a", 2, 10))
    assert len(bus.sent) == 1


async def test_the_trailing_timer_sends_the_latest() -> None:
    bus = Bus()
    async with ProgressPublisher(ORDER, bus.publish, ManualClock(), window_s=0.02) as publisher:
        for done in range(1, 6):
            publisher.tell(Progress(DOWN, "a", done, 10))
        await until(lambda: len(bus.sent) == 2)
        assert [event.current_bytes for event in bus.sent] == [1, 5]
    assert len(bus.sent) == 2


async def test_a_bus_that_is_away_stops_no_work() -> None:
    bus, clock = Bus(), ManualClock()
    bus.down = True
    async with ProgressPublisher(ORDER, bus.publish, clock) as publisher:
        publisher.tell(Progress(DOWN, "a", 1, 10))
        await asyncio.sleep(0)
        bus.down = False
        clock.advance(1)
        publisher.tell(Progress(DOWN, "a", 2, 10))
    assert [event.current_bytes for event in bus.sent] == [2]
    assert bus.sent[0].seq > 1  # a lost one leaves a gap: who merges by number is not fooled


async def test_a_slow_bus_gets_the_latest_not_a_backlog() -> None:
    sent: list[int] = []
    go = asyncio.Event()

    async def slow(event: InstallProgress) -> None:
        await go.wait()
        sent.append(event.current_bytes)

    clock = ManualClock()
    async with ProgressPublisher(ORDER, slow, clock) as publisher:
        for done in range(1, 10):
            publisher.tell(Progress(DOWN, "a", done, 10))
            clock.advance(1)
            await asyncio.sleep(0)
        go.set()
    assert sent == [1, 2, 9]  # the one under way, the one behind it, and then the latest


async def test_a_bus_that_hangs_does_not_hold_up_the_reply() -> None:
    async def hang(_event: InstallProgress) -> None:
        await asyncio.Event().wait()

    async with ProgressPublisher(ORDER, hang, ManualClock(), flush_timeout_s=0.01) as publisher:
        publisher.tell(Progress(DOWN, "a", 1, 10))


async def test_without_an_operation_nobody_is_told() -> None:
    bus = Bus()
    async with ProgressPublisher(ProgressSubject("", "n", "b"), bus.publish, ManualClock()) as publisher:
        publisher.tell(Progress(DOWN, "a", 1, 10))
    assert bus.sent == []
    assert publisher.phase == "downloading"
