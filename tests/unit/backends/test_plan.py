"""The plan, in the words of the documents: queued, retried, cleared by inventory, still installing."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from msgspec import structs

from corral.contract.messages.backends import NodeBackend
from corral.controller.backends.evidence import UNVERIFIED
from corral.controller.backends.plan import (
    BuildOrNot,
    Done,
    Drop,
    Fail,
    Hold,
    HoldCause,
    NoBuild,
    NodeWorld,
    NotLookedUp,
    Skip,
    Step,
    Stop,
    Wait,
    plan,
)
from corral.controller.backends.rules import Unwanted, Wanted
from corral.controller.orders.order import Build, Send
from corral.store.records import BackendIntent, IntentStage, OrderKind

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
SECOND = timedelta(seconds=1)
NEW = Build("cpu-vllm", "sha256:new")
WANTED = Wanted("t", 7, "op7")
UNWANTED = Unwanted(8, "op8")
NODE = NodeWorld("n1", "barn", "healthy", boot_id="b1", reported_at=NOON)
LOCALAI = replace(NODE, accepts=False, boot_id="")
EPOCH = 3
LONG_AGO = NOON - timedelta(days=1)


def intent(stage: str = "waiting", kind: str = "install", **more: Any) -> BackendIntent:
    defaults: dict[str, Any] = {"generation": 7, "operation_id": "op7", "attempt": 1, "digest": "sha256:new"}
    return BackendIntent(
        node_id="n1",
        backend="vllm",
        kind=OrderKind(kind),
        stage=IntentStage(stage),
        **({"updated_at": LONG_AGO} | defaults | more),
    )


def sent(kind: str = "install", **more: Any) -> BackendIntent:
    """Accepted by the worker that runs now."""
    return intent("sent", kind, **({"boot_id": "b1", "accepted_at": NOON, "epoch": EPOCH} | more))


def called(kind: str = "install", **more: Any) -> BackendIntent:
    """Sent to a worker that answers when it is done, and has fifteen minutes for it."""
    until = NOON + timedelta(minutes=15)
    return intent("sent", kind, **({"epoch": EPOCH, "sent_at": NOON, "next_try_at": until} | more))


def doing(node: NodeWorld, what: BackendIntent) -> NodeWorld:
    return replace(node, intents={"vllm": what})


def having(digest: str, when: str = "", node: NodeWorld = NODE, version: str = "", **more: Any) -> NodeWorld:
    row = NodeBackend("vllm", False, False, installed_at=when, digest=digest, version=version)
    return replace(node, backends=(row,), **more)


def steps(
    node: NodeWorld, want: Wanted | Unwanted | None = WANTED, build: BuildOrNot = NEW, now: datetime = NOON
) -> list[Step]:
    return plan(node, {"vllm": want} if want else {}, {"vllm": build}, now, epoch=EPOCH)


def planned(
    node: NodeWorld, want: Wanted | Unwanted | None = WANTED, build: BuildOrNot = NEW, now: datetime = NOON
) -> Step | None:
    found = steps(node, want, build, now)
    assert len(found) <= 1, found
    return found[0] if found else None


def install(attempt: int = 1, **more: Any) -> Send:
    return replace(Send("vllm", OrderKind.INSTALL, NEW, 7, "op7", attempt), **more)


def done(digest: str = "sha256:new", operation: str = "op7", generation: int = 7, kind: str = "install") -> Done:
    return Done("vllm", operation, generation, OrderKind(kind), digest)


def test_a_missing_backend_is_installed_at_once() -> None:
    assert planned(NODE) == install()


def test_another_digest_is_an_upgrade_and_the_right_one_is_success() -> None:
    assert planned(having("sha256:old", "monday")) == install(kind=OrderKind.UPGRADE, before="monday sha256:old")
    assert planned(having("sha256:new")) == done()


def test_success_is_told_once() -> None:
    assert planned(having("sha256:new", intents={"vllm": intent("done")})) is None


def test_success_only_when_the_inventory_shows_it() -> None:
    """The call may have returned; as long as the node does not list it, nothing is done."""
    assert planned(doing(NODE, sent())) == Wait("vllm", "op7", OrderKind.INSTALL)
    assert planned(having("sha256:new", intents={"vllm": sent()})) == done()
    refused = planned(doing(NODE, sent(answered=True)))
    assert isinstance(refused, Fail)
    assert "inventory does not show the result" in refused.reason


@pytest.mark.parametrize("status", ["offline", "unhealthy", "draining", "pending"])
def test_a_node_that_is_not_healthy_is_queued_and_retried_when_it_is(status: str) -> None:
    held = Hold("vllm", "op7", OrderKind.INSTALL, HoldCause.NODE, f"node {status}, will retry when healthy")
    assert planned(replace(NODE, status=status)) == held
    assert planned(doing(replace(NODE, status=status), sent())) == held
    assert isinstance(planned(NODE), Send)


def test_a_node_without_the_bus_or_without_inventory_waits() -> None:
    without_bus = planned(replace(NODE, bus_down=True))
    assert isinstance(without_bus, Hold)
    assert without_bus.why == "node"
    assert planned(doing(replace(NODE, bus_down=True), intent(failures=1))) == without_bus
    unknown = planned(replace(NODE, known=False))
    assert unknown == Hold("vllm", "op7", OrderKind.INSTALL, HoldCause.TURN, "waits for the node's inventory")


def test_a_node_that_lost_the_bus_is_still_at_what_it_accepted() -> None:
    """Or everybody who watches would leave with "only waiting" when the bus is restarted."""
    assert planned(doing(replace(NODE, bus_down=True), sent())) == Wait("vllm", "op7", OrderKind.INSTALL)
    lost_both = replace(NODE, bus_down=True, status="offline")
    assert isinstance(planned(doing(lost_both, sent())), Hold)
    restarted = replace(NODE, bus_down=True, boot_id="b2")
    assert isinstance(planned(doing(restarted, sent())), Hold)


def test_a_month_offline_changes_nothing() -> None:
    assert planned(doing(NODE, intent(failures=4000, attempt=4000))) == install(4001)


def test_an_order_lost_with_its_worker_is_sent_again_as_the_same_attempt() -> None:
    restarted = doing(replace(NODE, boot_id="b2"), sent(before="monday"))
    assert planned(restarted) == install(again=True)
    assert planned(replace(restarted, orders=frozenset({("op7", 1)}))) == Wait("vllm", "op7", OrderKind.INSTALL)
    unheard = replace(restarted, known=False)
    assert isinstance(planned(unheard), Hold), "its first heartbeat may tell of the order"


def test_an_order_a_worker_never_mentions_is_sent_again_as_the_same_attempt() -> None:
    node = doing(NODE, sent())
    assert planned(replace(node, reported_at=NOON + 61 * SECOND)) == install(again=True)
    assert isinstance(planned(replace(node, reported_at=NOON + 59 * SECOND)), Wait)
    assert isinstance(planned(replace(node, reported_at=NOON + 61 * SECOND, orders=frozenset({("op7", 1)}))), Wait)


def test_an_order_whose_controller_died_before_it_was_accepted_is_sent_again() -> None:
    unanswered = sent(accepted_at=None, boot_id="")
    assert isinstance(planned(doing(NODE, unanswered)), Wait), "our own call is on its way"
    orphan = doing(NODE, structs.replace(unanswered, epoch=EPOCH - 1))
    assert planned(orphan) == install(again=True)
    assert isinstance(planned(replace(orphan, orders=frozenset({("op7", 1)}))), Wait), "it had arrived"
    unsure = doing(NODE, structs.replace(unanswered, next_try_at=NOON))
    assert planned(unsure) == install(again=True)


def test_a_failure_waits_for_its_time_and_is_visible() -> None:
    later = NOON + 30 * SECOND
    failing = intent(failures=1, next_try_at=later, reason="disk full")
    assert planned(doing(NODE, failing)) == Hold("vllm", "op7", OrderKind.INSTALL, HoldCause.RETRY, "disk full", later)
    assert planned(doing(NODE, structs.replace(failing, next_try_at=NOON))) == install(2)


def test_what_time_does_not_cure_is_parked_until_a_new_rule_or_another_worker() -> None:
    node = doing(NODE, intent("parked", reason="wrong digest twice", boot_id="b1"))
    assert planned(node) == Hold("vllm", "op7", OrderKind.INSTALL, HoldCause.PARKED, "wrong digest twice")
    assert planned(node, Wanted("t2", 9, "op9")) == install(2, generation=9, operation="op9")
    assert planned(replace(node, boot_id="b2")) == install(2)


def test_a_refusal_whose_cause_is_gone_is_tried_again_at_once() -> None:
    parked = doing(NODE, intent("parked", reason="it lacks libgomp.so.1", boot_id="b1", failures=1))
    assert planned(parked) == Hold("vllm", "op7", OrderKind.INSTALL, HoldCause.PARKED, "it lacks libgomp.so.1")
    assert planned(replace(parked, cured=frozenset({("op7", 1)}))) == install(2)
    later = doing(NODE, intent(reason="apt-get failed", failures=1, next_try_at=NOON + SECOND))
    assert planned(replace(later, cured=frozenset({("op7", 1)}))) == install(2)
    for other in (("op7", 2), ("op8", 1)):  # of another order: it says nothing of this one
        assert planned(replace(parked, cured=frozenset({other}))) == planned(parked)


def test_no_build_for_the_platform_is_skipped_with_the_reason() -> None:
    assert planned(NODE, build=NoBuild("no linux/arm64 build")) == Skip("vllm", "op7", "no linux/arm64 build")


def test_a_build_that_is_not_known_yet_is_waited_for() -> None:
    looking = planned(NODE, build=NotLookedUp())
    assert isinstance(looking, Hold)
    assert looking.why == "turn"
    failing = planned(NODE, build=NotLookedUp("registry away", NOON))
    assert failing == Hold("vllm", "op7", OrderKind.INSTALL, HoldCause.RETRY, "registry away", NOON)


def test_delete() -> None:
    assert planned(having("sha256:x"), UNWANTED) == Send("vllm", OrderKind.DELETE, None, 8, "op8", 1)
    assert planned(NODE, UNWANTED) == done("", "op8", 8, "delete")
    assert isinstance(planned(replace(NODE, known=False), UNWANTED), Hold)
    system = replace(NODE, backends=(NodeBackend("vllm", True, False),))
    assert isinstance(planned(system, UNWANTED), Skip)


def test_opposite_intents_collapse() -> None:
    waiting = intent(next_try_at=NOON + timedelta(hours=1), failures=1)
    assert planned(doing(NODE, waiting), UNWANTED) == done("", "op8", 8, "delete")


def test_an_order_under_way_that_a_later_rule_contradicts_is_stopped_first() -> None:
    under_way = having("sha256:old", intents={"vllm": sent()})
    hold = Hold("vllm", "op8", OrderKind.DELETE, HoldCause.TURN, "waits for an earlier order to end")
    assert steps(under_way, UNWANTED) == [Stop("vllm", "op7", 1), hold]
    lost = planned(replace(under_way, boot_id="b2"), UNWANTED)
    assert lost == Send("vllm", OrderKind.DELETE, None, 8, "op8", 2), "numbered through, so it is never an older order"


def test_what_is_on_file_is_no_proof_while_an_earlier_order_may_have_changed_it() -> None:
    """A delete whose sender died before it heard an answer may be done, and the inventory be from before it."""
    unheard = sent("delete", accepted_at=None, sent_at=NOON, epoch=EPOCH - 1, digest="")
    stale = having("sha256:new", intents={"vllm": unheard})
    again = Wanted("t2", 9, "op9")
    hold = Hold("vllm", "op9", OrderKind.INSTALL, HoldCause.TURN, "waits for an earlier order to end")
    assert steps(stale, again) == [Stop("vllm", "op7", 1), hold], "whether it is under way, the answer to a stop tells"
    told = replace(stale, reported_at=NOON + 61 * SECOND)
    assert steps(told, again) == [done("sha256:new", "op9", 9)], "it never arrived: the node has told since"
    restarted = replace(stale, boot_id="b2")
    waits = Hold("vllm", "op9", OrderKind.INSTALL, HoldCause.TURN, "waits for the node's inventory")
    assert steps(restarted, again) == [waits], "it may still be on its way, to the one that runs now"
    later = replace(restarted, reported_at=NOON + 6 * SECOND)
    assert steps(later, again) == [done("sha256:new", "op9", 9)], "nor has the one that runs now got it"
    failed = intent("waiting", "delete", sent_at=NOON + SECOND, digest="")
    before = having("", "monday", LOCALAI, intents={"vllm": failed})
    assert steps(before, again) == [waits], "the first of its tries may have done it"
    assert steps(replace(before, reported_at=NOON + 2 * SECOND), again) == [done("", "op9", 9)]


def test_where_there_is_nothing_to_do_what_was_left_of_an_earlier_rule_goes() -> None:
    no_build = NoBuild("no linux/arm64 build")
    again = Wanted("t2", 9, "op9")
    skip = Skip("vllm", "op9", "no linux/arm64 build")
    assert steps(doing(NODE, sent("delete", answered=True)), again, no_build) == [skip, Drop("vllm")]
    assert steps(doing(NODE, intent("done")), again, no_build) == [skip]


def test_an_order_nobody_answered_is_not_waited_for_though_a_later_rule_wants_it_too() -> None:
    again = Wanted("t2", 9, "op9")
    hold = Hold("vllm", "op9", OrderKind.INSTALL, HoldCause.TURN, "waits for an earlier order to end")
    ours = sent(accepted_at=None, sent_at=NOON)
    assert steps(doing(NODE, ours), again) == [hold], "the answer is on its way"
    assert steps(doing(NODE, structs.replace(ours, next_try_at=NOON)), again) == [Stop("vllm", "op7", 1), hold]


def test_an_order_under_way_that_a_later_rule_wants_too_goes_on() -> None:
    again = Wanted("t2", 9, "op9")
    assert steps(doing(NODE, sent()), again) == [
        Hold("vllm", "op9", OrderKind.INSTALL, HoldCause.TURN, "waits for an earlier order to end")
    ]
    assert planned(having("sha256:new", intents={"vllm": sent(answered=True)}), again) == done("sha256:new", "op9", 9)


def test_an_intent_no_rule_stands_behind_is_dropped_and_its_bytes_stop_when_asked() -> None:
    assert planned(doing(NODE, intent()), None) == Drop("vllm")
    assert planned(doing(NODE, sent()), None) is None, "withdrawn: what runs may end"
    cancelled = replace(doing(NODE, sent()), stopping=frozenset({"op7"}))
    assert planned(cancelled, None) == Stop("vllm", "op7", 1)
    assert planned(replace(cancelled, status="offline"), None) is None, "it is told when it is back"
    unheard = replace(cancelled, intents={"vllm": sent(accepted_at=None, boot_id="", epoch=EPOCH - 1)})
    assert planned(unheard, None) == Stop("vllm", "op7", 1), "who sent it died before hearing that it was accepted"
    assert planned(replace(cancelled, boot_id="b2"), None) == Drop("vllm"), "it died with its worker"
    assert planned(doing(NODE, intent("idle")), None) is None


def test_forced_means_fetched_again() -> None:
    forced = replace(WANTED, force=True)
    send = planned(having("sha256:new", "monday"), forced)
    assert send == install(force=True, before="monday sha256:new"), (
        "an install with the flag, which every worker honours"
    )
    at_it = having("sha256:new", "monday", intents={"vllm": sent(before="monday")})
    assert isinstance(planned(at_it, forced), Wait)
    fetched = having("sha256:new", "tuesday", intents=at_it.intents)
    assert planned(fetched, forced) == done()
    assert planned(replace(fetched, intents={"vllm": intent("done")}), forced) is None, "and not for ever"
    assert planned(NODE, forced) == install(), "what is not there need not be forced"


def test_what_was_changed_by_hand_is_put_right_but_old_news_is_not_believed() -> None:
    settled = intent("done", updated_at=NOON)
    gone = doing(NODE, settled)
    assert planned(gone, now=NOON + 5 * SECOND) is None
    assert planned(gone, now=NOON + 31 * SECOND) == install(2)
    other = having("sha256:other", intents={"vllm": settled})
    assert planned(other, now=NOON + 31 * SECOND) == install(2, kind=OrderKind.UPGRADE, before=" sha256:other")


def test_a_meta_backend_is_known_by_the_build_it_stands_for() -> None:
    meta = NodeBackend("vllm", False, True, meta_backend_for="cpu-vllm")
    build = NodeBackend("cpu-vllm", False, False, digest="sha256:new", alias="vllm")
    assert planned(replace(NODE, backends=(meta, build))) == done()
    older = NodeBackend("cpu-vllm", False, False, digest="sha256:old")
    assert planned(replace(NODE, backends=(meta, older))) == install(kind=OrderKind.UPGRADE, before=" sha256:old")
    assert planned(replace(NODE, backends=(meta,))) == install(), "it stands for nothing"


# Workers that answer when they are done.


def test_still_installing_is_no_failure_and_gets_no_second_call() -> None:
    late = called(running=True)
    assert planned(doing(LOCALAI, late)) == Wait("vllm", "op7", OrderKind.INSTALL, running=True)
    assert planned(having("", "monday", LOCALAI, intents={"vllm": late})) == done(""), "cleared by inventory"
    assert planned(doing(LOCALAI, late), now=NOON + timedelta(minutes=15)) == install(2)


def test_a_call_whose_controller_died_counts_as_still_running() -> None:
    orphan = called(epoch=EPOCH - 1)
    assert planned(doing(LOCALAI, orphan)) == Wait("vllm", "op7", OrderKind.INSTALL, running=True)
    assert planned(doing(LOCALAI, called())) == Wait("vllm", "op7", OrderKind.INSTALL)


def test_a_worker_that_reports_no_digest() -> None:
    assert planned(having("", "monday", LOCALAI)) == done(""), "presence is all an install can show"
    upgraded = replace(WANTED, upgraded=True)
    send = planned(having("", "monday", LOCALAI), upgraded)
    assert send == install(kind=OrderKind.UPGRADE, before="monday")
    upgrading = {"vllm": called("upgrade", before="monday")}
    assert isinstance(planned(having("", "monday", LOCALAI, intents=upgrading), upgraded), Wait)
    unverified = planned(having("", "tuesday", LOCALAI, intents=upgrading), upgraded)
    assert unverified == replace(done(""), note=UNVERIFIED)
    settled = {"vllm": intent("done", digest="")}
    assert planned(having("", "tuesday", LOCALAI, intents=settled), upgraded) is None


def test_the_version_or_digest_that_a_localai_worker_reports_decides() -> None:
    """It reinstalled what it had, from an index of an hour ago, and answers that it is done."""
    upgraded, second = replace(WANTED, upgraded=True), Build("cpu-vllm", "sha256:new", "2.0")
    assert planned(having("", "monday", LOCALAI, "1.0"), upgraded, second) == install(
        kind=OrderKind.UPGRADE, before="monday", build=second
    )
    ended = {"vllm": called("upgrade", before="monday sha256:old", answered=True)}
    by_version = planned(having("", "tuesday", LOCALAI, "1.0", intents=ended), upgraded, second)
    assert isinstance(by_version, Fail)
    assert by_version.reason.startswith("the node still reports version 1.0, not 2.0: ")
    assert "up to an hour" in by_version.reason
    by_digest = planned(having("sha256:old", "tuesday", LOCALAI, intents=ended), upgraded)
    assert isinstance(by_digest, Fail)
    assert by_digest.reason.startswith("the node still reports digest sha256:old, not sha256:new: ")
    after = planned(having("", "tuesday", LOCALAI, "2.0", intents=ended), upgraded, second)
    assert after == replace(done(""), version="2.0"), "verified: no note"
    newer = planned(having("", "tuesday", LOCALAI, "2.1", intents=ended), upgraded, second)
    assert newer == replace(done(""), version="2.1"), "it may have read the index after us"


def test_a_localai_worker_that_did_nothing_is_not_said_to_report_another_build() -> None:
    ended = {"vllm": called("upgrade", before="monday", answered=True)}
    silent = planned(having("", "monday", LOCALAI, intents=ended), replace(WANTED, upgraded=True))
    assert silent == Fail("vllm", "op7", "the node reported success, but its inventory does not show the result")
    again = {"vllm": called(before="monday sha256:new", answered=True)}
    same = planned(having("sha256:new", "monday", LOCALAI, intents=again), replace(WANTED, force=True))
    assert same == silent


def test_a_localai_worker_that_reports_the_wanted_version_has_nothing_to_do() -> None:
    second = Build("cpu-vllm", "sha256:new", "2.0")
    node = having("", "monday", LOCALAI, "2.0")
    assert planned(node, replace(WANTED, upgraded=True), second) == replace(done(""), version="2.0")


def test_a_worker_that_resolves_for_itself_may_find_a_newer_build() -> None:
    upgrading = {"vllm": called("upgrade", before="monday")}
    assert planned(having("sha256:newest", "tuesday", LOCALAI, intents=upgrading)) == done("sha256:newest")
    settled = {"vllm": intent("done", digest="sha256:newest")}
    assert planned(having("sha256:newest", "tuesday", LOCALAI, intents=settled)) is None
    ours = {"vllm": sent("upgrade", before="monday")}
    assert isinstance(planned(having("sha256:newest", "tuesday", intents=ours)), Wait), "ours fetches what it is told"


def test_a_worker_that_cannot_go_back_is_left_as_it_is_when_an_earlier_rule_holds_again() -> None:
    upgraded = {"vllm": intent("done", "upgrade", generation=9, digest="sha256:newest")}
    step = planned(having("sha256:newest", "tuesday", LOCALAI, intents=upgraded))
    assert step == done("sha256:newest")
    assert isinstance(planned(having("sha256:newest", "tuesday", intents=upgraded)), Send), "ours does go back"
    deleted = {"vllm": intent("done", "delete", generation=9, digest="")}
    assert isinstance(planned(replace(LOCALAI, intents=deleted)), Send), "what is not there is installed"


def test_a_worker_that_cannot_be_stopped_is_waited_for() -> None:
    busy = having("", "monday", LOCALAI, intents={"vllm": called()})
    hold = Hold("vllm", "op8", OrderKind.DELETE, HoldCause.TURN, "waits for an earlier order to end")
    assert planned(busy, UNWANTED) == hold
    about_now = NOON + timedelta(minutes=15, seconds=30)
    assert planned(busy, UNWANTED, now=about_now) == hold, "our call is about to say how it went"
    long_over = NOON + timedelta(minutes=17)
    assert planned(busy, UNWANTED, now=long_over) == hold, "it was not asked since: what is on file may be the past"
    asked = replace(busy, reported_at=NOON + timedelta(minutes=16))
    assert isinstance(planned(asked, UNWANTED, now=long_over), Send), "whatever became of our call, it is over"
    late = replace(asked, intents={"vllm": called(running=True)})
    assert isinstance(planned(late, UNWANTED, now=NOON + timedelta(minutes=16)), Send), "it had its time"


def test_a_worker_that_is_another_kind_now_is_not_waited_for() -> None:
    """The machine was set up anew with a LocalAI worker: nobody will ever report what a Corral worker accepted."""
    changed = replace(LOCALAI, intents={"vllm": sent()})
    assert isinstance(planned(changed, UNWANTED), Done)
    assert isinstance(planned(changed), Send)


def test_an_upgrade_node_by_node_is_fetched_first_then_switched() -> None:
    rolling = replace(WANTED, upgraded=True, max_parallel="25%")
    old = having("sha256:old", "monday")
    fetch = planned(old, rolling)
    assert isinstance(fetch, Send)
    assert (fetch.kind, fetch.attempt, fetch.fetched) == (OrderKind.FETCH, 1, False)
    fetching = sent("fetch", before="monday")
    assert isinstance(planned(replace(old, intents={"vllm": fetching}), rolling), Wait)
    told = structs.replace(fetching, answered=True)
    assert planned(replace(old, intents={"vllm": told}), rolling) == Fail(
        "vllm", "op7", "the node reported success, but its inventory does not show the result"
    )
    there = replace(old, backends=(structs.replace(old.backends[0], fetched=("sha256:new",)),))
    switch = planned(replace(there, intents={"vllm": told}), rolling)
    assert isinstance(switch, Send)
    assert (switch.kind, switch.attempt, switch.fetched) == (OrderKind.UPGRADE, 2, True)


@pytest.mark.parametrize(
    ("node", "build", "max_parallel"),
    [
        (having("sha256:old", "monday"), Build("vllm", "sha256:new"), ""),  # all at once: nothing to wait for
        (having("sha256:old", "monday"), Build("vllm", ""), "25%"),  # nobody could tell that it is fetched
        (having("", "monday", LOCALAI), Build("vllm", "sha256:new"), "25%"),  # it knows no such order
    ],
)
def test_otherwise_an_upgrade_is_one_order(node: NodeWorld, build: Build, max_parallel: str) -> None:
    order = planned(node, replace(WANTED, upgraded=True, max_parallel=max_parallel), build)
    assert isinstance(order, Send)
    assert order.kind is OrderKind.UPGRADE


def test_a_digest_nobody_knew_beforehand_shows_by_presence() -> None:
    unknown = Build("vllm", "")
    assert planned(having("sha256:whatever"), build=unknown) == done("sha256:whatever")
    upgraded = replace(WANTED, upgraded=True)
    assert isinstance(planned(having("sha256:old", "monday"), upgraded, unknown), Send)
    upgrading = {"vllm": sent("upgrade", before="monday", digest="")}
    assert planned(having("sha256:x", "tuesday", intents=upgrading), upgraded, unknown) == done("sha256:x")
