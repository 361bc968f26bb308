"""What `scripts/flows` counts among recorded calls. That it can record a fleet is seen when it runs."""

from __future__ import annotations

from typing import Any

from tests.support.scripts import load_script

flows = load_script("flows")


def call(*stack: str) -> Any:
    return tuple(flows.Function(*function.split(" ")) for function in stack)


ROUTE = call("async controller/api.py create")
LOOP = call("async controller/loop.py run_once")
SEND = call("async controller/orders.py send", "async controller/loop.py run_once", "plain cli/main.py main")
DECIDE = call("plain controller/plan.py decide", "async controller/loop.py run_once")
INSERT = call("async store/rows.py insert", "async controller/api.py create")
POST = call("async client/calls.py post")
CHANCE = call("async controller/prune.py prune")


def test_a_file_is_on_the_path_with_a_new_coroutine_or_one_below_it() -> None:
    found = flows.count_files([{1: {LOOP}, 2: {LOOP, ROUTE, SEND, DECIDE, INSERT, POST}}])["install"]
    assert found.in_programs == {"controller/api.py", "controller/loop.py", "controller/orders.py"}
    assert found.on_path == found.in_programs | {"client/calls.py", "store/rows.py"}
    assert found.touched == (found.on_path - {"controller/loop.py"}) | {"controller/plan.py"}


def test_calls_of_an_idle_period_or_of_some_runs_only_do_not_count() -> None:
    idle_later = {1: {LOOP}, 2: {ROUTE}, 3: {CHANCE}, 4: {SEND, CHANCE, ROUTE}}
    found = flows.count_files([idle_later, {1: {LOOP}, 2: {ROUTE, CHANCE}, 4: {SEND, CHANCE}}])
    assert found["install"].on_path == {"controller/api.py"}
    assert found["cold load"].touched == {"controller/orders.py"}
    assert found["warm"].touched == set()


def test_kit_and_contract_never_count() -> None:
    found = flows.count_files([{2: {call("async kit/tasks.py run"), call("plain contract/ids.py new_id")}}])
    assert found["install"] == flows.Files(frozenset(), frozenset())
