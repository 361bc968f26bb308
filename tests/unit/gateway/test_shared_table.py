"""What the processes of one gateway count together, with several views of one table in one process."""

from __future__ import annotations

import os

from hypothesis import given
from hypothesis import strategies as st

from corral.contract.view import KeyLimits
from corral.gateway.http.rate_limits import KeyLimiter
from corral.gateway.processes.in_flight import SharedInFlight, SharedSlotCounter, row_name
from corral.gateway.processes.metrics import keep_counters, merge_snapshots, restore_metrics, take_snapshot
from corral.gateway.processes.rate_limits import SharedLimiters, bucket_row, fill, running_row
from corral.gateway.processes.table import RowAllocator, SharedTable
from corral.gateway.receipts.metrics import Metrics, RouteClass, render
from corral.gateway.routing.pick import BUSY


def tables(processes: int, rows: int = 16) -> list[SharedTable]:
    """The parent's, then one for each child."""
    first = SharedTable.create(processes + 1, rows=rows)
    others = [
        SharedTable(os.dup(first.descriptor), columns=processes + 1, column=column)
        for column in range(1, processes + 1)
    ]
    return [first, *others]


def close(found: list[SharedTable]) -> None:
    for each in found:
        os.close(each.descriptor)


def shared_counters(found: list[SharedTable], slots: int) -> list[SharedSlotCounter]:
    counters = []
    for table in found:
        in_flight = SharedInFlight(table)
        in_flight.use({row_name("p1"): 1})
        counter = in_flight.counter("p1", "n1")
        assert isinstance(counter, SharedSlotCounter)
        counter._slots = slots
        counters.append(counter)
    return counters


def test_requests_of_every_process_fill_a_replica() -> None:
    found = tables(2)
    _, one, two = shared_counters(found, slots=2)
    one.begin()
    two.begin()
    assert (two.in_flight, two.is_over) == (2, False)
    one.begin()
    assert one.is_over
    one.end()
    two.refresh()
    assert two._ranks[0] == 2 + BUSY
    one.end()
    two.refresh()
    assert two._ranks[0] == 1
    close(found)


def test_what_a_node_reports_counts_as_others_only_beyond_what_was_ours() -> None:
    found = tables(2)
    parent, one, two = shared_counters(found, slots=100)
    for counter in (one, one, two):
        counter.begin()
    one.end()  # the node may have counted it still
    parent.on_report(5)
    one.refresh()
    assert one.in_flight == 2 + 2  # ours, and two of another gateway
    parent.on_report(4)  # nothing has begun since: at the last report there were two of ours
    one.refresh()
    assert one.in_flight == 2 + 2
    parent.on_report(0)
    two.refresh()
    assert two.in_flight == 2
    close(found)


STEP = st.tuples(st.integers(0, 2), st.floats(0, 30), st.sampled_from(["ask", "ask", "ask", "end"]), st.integers(0, 9))


@given(st.integers(1, 20), st.lists(STEP, max_size=80))
def test_limits_over_several_processes_are_those_of_one(limit: int, steps: list[tuple[int, float, str, int]]) -> None:
    found = tables(3)
    limits = KeyLimits(requests_per_min=limit, tokens_per_min=limit * 5, concurrent=4)
    rows = {
        running_row("k"): 1,
        bucket_row("requests", "k", limit): 2,
        bucket_row("tokens", "k", limit * 5): 3,
    }
    now = 1000.0
    fill(found[0], 2, limit, now)
    fill(found[0], 3, limit * 5, now)
    shared = []
    for table in found[1:]:
        limiters = SharedLimiters(table, lambda: now)
        limiters.use(rows)
        limiter = limiters.of("k", limits, now)
        assert limiter is not None
        shared.append(limiter)
    alone = KeyLimiter(limits, now)
    running: list[int] = []
    for process, passed_s, what, tokens in steps:
        now += passed_s
        if what == "ask":
            refusal, expected = shared[process].check(now), alone.check(now)
            if refusal is None and expected is not None:
                # The numbers of several processes are sums of many floats: they begin a thousandth of a request early.
                assert expected.retry_after_s <= 0.001 * 60 / expected.limit, expected
                break  # from here on the two have counted differently
            assert (refusal is None) == (expected is None), (refusal, expected)
            if refusal is None:
                assert shared[process].begin()
                alone.begin()
                running.append(process)
        elif running:
            alone.check(now)  # it fills its buckets only when it is asked
            shared[running.pop(0)].end(tokens)
            alone.end(tokens)
    close(found)


def test_whoever_comes_second_to_the_last_one_is_refused_after_all() -> None:
    found = tables(2)
    rows = {running_row("k"): 1, bucket_row("requests", "k", 1): 2}
    fill(found[0], 2, 1, 5.0)
    pair = []
    for table in found[1:]:
        limiters = SharedLimiters(table, lambda: 5.0)
        limiters.use(rows)
        limiter = limiters.of("k", KeyLimits(requests_per_min=1), 5.0)
        assert limiter is not None
        assert limiter.check(5.0) is None  # both have looked
        pair.append(limiter)
    assert [limiter.begin() for limiter in pair] == [True, False]
    assert found[0].total(found[0].first(1)) == 1
    close(found)


def test_a_row_is_used_again_only_when_it_has_rested_and_nothing_is_under_way() -> None:
    (table,) = found = tables(0, rows=3)
    close(found)
    table, child = found = tables(1, rows=3)
    now = 0.0
    rows = RowAllocator(table, lambda: now, rest_s=60.0)
    assert rows.assign(["a", "b", "c"]) == {"a", "b"}  # there is no room for a third
    busy = child.first(rows.rows["a"]) + 1
    child.cells[busy] = 1.0
    rows.assign(["b"])
    assert rows.assign(["b", "d"]) == set()  # too early
    now = 61.0
    assert rows.assign(["b", "d"]) == set()  # a request is still under way there
    child.cells[busy] = 0.0
    assert rows.assign(["b", "d"]) == {"d"}
    close(found)


def test_numbers_of_several_processes_are_added_and_those_of_the_dead_stay_counted() -> None:
    pair = [Metrics(), Metrics()]
    for metrics in pair:
        counts = metrics.routes[RouteClass.INFERENCE]
        counts.in_flight = 2
        counts.end(200, 0.5)
        metrics.relay.connections = 3
        metrics.relay.connections_open = 1
        metrics.totals["ejections"] = ("Times.", lambda: 4)
        metrics.gauges["body_bytes"] = ("Bytes.", lambda: 10)
    numbers = [take_snapshot(each) for each in pair]
    both = merge_snapshots((numbers[0], keep_counters(numbers[1])))
    text = render(restore_metrics(both), now=0.0, processes=both.process).decode()
    for line in (
        'corral_gateway_requests_total{route="inference",status="200"} 2.0',
        'corral_gateway_requests_in_flight{route="inference"} 1.0',
        'corral_gateway_request_seconds_count{route="inference"} 2.0',
        "corral_gateway_connections_total 6.0",
        "corral_gateway_connections_open 1.0",
        "corral_gateway_ejections_total 8.0",
        "corral_gateway_body_bytes 10.0",
    ):
        assert line in text.splitlines(), line
    assert "process_cpu_seconds_total" in text
