"""The plan, in the words of the documents: queued, retried, cleared by inventory, still installing."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.controller.desired.plan import (
    Build,
    Done,
    Drop,
    Hold,
    Installed,
    Intent,
    Kind,
    NoBuild,
    NodeWorld,
    Send,
    Skip,
    Stage,
    plan,
    retry_delay,
)
from corral.controller.desired.rules import Unwanted, Wanted

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
NEW = Build("cpu", "sha256:new")
WANTED = Wanted("t", 7, "op7")
UNWANTED = Unwanted(8, "op8")
NODE = NodeWorld("n1", "barn", "healthy", boot_id="b1")


def sent(kind: str = "install", **more: object) -> Intent:
    return Intent(Kind(kind), 7, "op7", stage=Stage.SENT, attempt=1, boot_id="b1", **more)  # type: ignore[arg-type]


def planned(node: NodeWorld, want: Wanted | Unwanted = WANTED, build: Build | NoBuild | None = NEW) -> object:
    steps = plan(node, {"vllm": want}, {"vllm": build} if build else {}, NOON)
    assert len(steps) <= 1
    return steps[0] if steps else None


def having(digest: str, when: str = "", **more: object) -> NodeWorld:
    return replace(NODE, installed={"vllm": Installed(digest, when)}, **more)  # type: ignore[arg-type]


def test_a_missing_backend_is_installed_at_once() -> None:
    assert planned(NODE) == Send("vllm", Kind.INSTALL, NEW, 7, "op7", 1)


def test_another_digest_is_an_upgrade_and_the_right_one_is_success() -> None:
    assert planned(having("sha256:old")) == Send("vllm", Kind.UPGRADE, NEW, 7, "op7", 1)
    assert planned(having("sha256:new")) == Done("vllm", "op7")


def test_success_only_when_the_inventory_shows_it() -> None:
    """The call may have returned; as long as the node does not list it, nothing is done."""
    assert planned(replace(NODE, intents={"vllm": sent()})) is None
    assert planned(having("sha256:new", intents={"vllm": sent()})) == Done("vllm", "op7")


@pytest.mark.parametrize("status", ["offline", "unhealthy", "draining", "pending"])
def test_a_node_that_is_not_healthy_is_queued_and_retried_when_it_is(status: str) -> None:
    step = planned(replace(NODE, status=status))
    assert step == Hold("vllm", "op7", Kind.INSTALL, f"node {status}, will retry when healthy")
    assert isinstance(planned(NODE), Send)


def test_a_month_offline_changes_nothing() -> None:
    node = replace(NODE, intents={"vllm": Intent(Kind.INSTALL, 7, "op7", failures=4000, attempt=4000)})
    assert planned(node) == Send("vllm", Kind.INSTALL, NEW, 7, "op7", 4001)


def test_still_installing_is_left_alone() -> None:
    assert planned(replace(NODE, intents={"vllm": sent()})) is None


def test_an_order_lost_with_its_worker_is_sent_again_as_the_same_attempt() -> None:
    restarted = replace(NODE, boot_id="b2", intents={"vllm": sent()})
    assert planned(restarted) == Send("vllm", Kind.INSTALL, NEW, 7, "op7", 1)
    assert planned(replace(restarted, orders=frozenset({"op7"}))) is None, "the new worker knows of it"


def test_a_failure_waits_for_its_time_and_is_visible() -> None:
    later = NOON + timedelta(seconds=30)
    node = replace(
        NODE, intents={"vllm": Intent(Kind.INSTALL, 7, "op7", attempt=1, next_try_at=later, reason="disk full")}
    )
    assert planned(node) == Hold("vllm", "op7", Kind.INSTALL, "disk full", later)
    due = replace(node, intents={"vllm": replace(node.intents["vllm"], next_try_at=NOON)})
    assert planned(due) == Send("vllm", Kind.INSTALL, NEW, 7, "op7", 2)


def test_what_time_does_not_cure_is_parked_until_a_new_rule() -> None:
    parked = Intent(Kind.INSTALL, 7, "op7", stage=Stage.PARKED, reason="wrong digest twice")
    node = replace(NODE, intents={"vllm": parked})
    assert planned(node) == Hold("vllm", "op7", Kind.INSTALL, "wrong digest twice")
    assert planned(node, Wanted("t2", 9, "op9")) == Send("vllm", Kind.INSTALL, NEW, 9, "op9", 1)


def test_no_build_for_the_platform_is_skipped_with_the_reason() -> None:
    assert planned(NODE, build=NoBuild("no linux/arm64 build")) == Skip("vllm", "op7", "no linux/arm64 build")


def test_delete() -> None:
    assert planned(having("sha256:x"), UNWANTED) == Send("vllm", Kind.DELETE, None, 8, "op8", 1)
    assert planned(NODE, UNWANTED) == Done("vllm", "op8")
    assert isinstance(planned(replace(NODE, known=False), UNWANTED), Hold)


def test_opposite_intents_collapse_and_orders_stay_serial() -> None:
    waiting = Intent(Kind.INSTALL, 7, "op7", attempt=1, next_try_at=NOON + timedelta(hours=1))
    assert planned(replace(NODE, intents={"vllm": waiting}), UNWANTED) == Done("vllm", "op8")
    under_way = having("sha256:old", intents={"vllm": sent()})
    assert planned(under_way, UNWANTED) is None, "the install ends first"
    assert isinstance(planned(having("sha256:old", boot_id="b2", intents={"vllm": sent()}), UNWANTED), Send)


def test_an_intent_no_rule_stands_behind_is_dropped() -> None:
    node = replace(NODE, intents={"vllm": Intent(Kind.INSTALL, 7, "op7")})
    assert plan(node, {}, {}, NOON) == [Drop("vllm")]


def test_forced_means_fetched_again() -> None:
    forced = replace(WANTED, force=True)
    assert planned(having("sha256:new", "monday"), forced) == Send("vllm", Kind.UPGRADE, NEW, 7, "op7", 1)
    at_it = having("sha256:new", "monday", intents={"vllm": sent("upgrade", before="monday")})
    assert planned(at_it, forced) is None
    assert planned(having("sha256:new", "tuesday", intents=at_it.intents), forced) == Done("vllm", "op7")


def test_a_worker_that_reports_no_digest() -> None:
    assert planned(having("", "monday")) == Done("vllm", "op7"), "presence is all an install can show"
    upgrading = {"vllm": sent("upgrade", before="monday")}
    assert planned(having("", "monday", intents=upgrading)) is None
    assert planned(having("", "tuesday", intents=upgrading)) == Done("vllm", "op7")


def test_retries_back_off_to_a_quarter_of_an_hour_for_ever() -> None:
    assert [retry_delay(n).total_seconds() for n in (1, 2, 3, 5, 6, 7, 10_000)] == [30, 60, 120, 480, 900, 900, 900]


@st.composite
def worlds(draw: st.DrawFn) -> tuple[NodeWorld, Wanted | Unwanted]:
    stage = draw(st.sampled_from(list(Stage)))
    intent = Intent(
        draw(st.sampled_from(list(Kind))),
        draw(st.integers(5, 8)),
        draw(st.sampled_from(["op7", "op8"])),
        stage=stage,
        attempt=draw(st.integers(1, 3)),
        boot_id=draw(st.sampled_from(["", "b1", "b0"])) if stage is Stage.SENT else "",
        next_try_at=draw(st.sampled_from([None, NOON, NOON + timedelta(minutes=5)])),
    )
    installed = draw(st.sampled_from([None, "sha256:new", "sha256:old"]))
    node = replace(
        NODE,
        installed={"vllm": Installed(installed)} if installed else {},
        intents={"vllm": intent} if draw(st.booleans()) else {},
        orders=frozenset(draw(st.lists(st.sampled_from(["op7"])))),
    )
    wants: list[Wanted | Unwanted] = [WANTED, UNWANTED]
    return node, draw(st.sampled_from(wants))


@given(worlds())
def test_carrying_out_plans_comes_to_rest_at_what_is_wanted(world: tuple[NodeWorld, Wanted | Unwanted]) -> None:
    node, want = world
    now = NOON
    for _ in range(20):
        steps = plan(node, {"vllm": want}, {"vllm": NEW}, now)
        if steps and isinstance(steps[0], Done):
            assert ("vllm" in node.installed) == isinstance(want, Wanted)
            return
        if steps and isinstance(steps[0], Hold) and node.intents["vllm"].stage is Stage.PARKED:
            return  # rests, told, until a person or a new rule moves it
        node, now = carry_out(node, steps[0] if steps else None), now + timedelta(minutes=15)
    pytest.fail(f"still moving: {node}")


def carry_out(node: NodeWorld, step: object) -> NodeWorld:
    """A worker that does what it is told; with nothing to do, what is under way ends."""
    match step:
        case Send(backend, kind, build):
            installed = {} if kind is Kind.DELETE or build is None else {backend: Installed(build.digest)}
            return replace(node, installed=installed, intents={})
        case None:
            return replace(node, intents={})
        case _:
            return node
