"""What `corral why` prints."""

from __future__ import annotations

from corral.cli.fleet import why_text
from corral.contract.loads import LoadStatus
from corral.contract.why import WhyCheck, WhyModel, WhyNode, WhyReplica, WhyScore, WhySpace, WhyVerdict

GIB = 1024**3


def model(**more: object) -> WhyModel:
    told: dict[str, object] = {
        "model": "m",
        "decision": "placed",
        "text": "barn: needs 4.0 GiB",
        "memory_bytes": 4 * GIB,
        "memory_how": "3 files",
        "scaling": "hold",
        "scaling_text": "as it should be",
    }
    return WhyModel(**(told | more))  # type: ignore[arg-type]


def test_a_model_in_a_few_lines() -> None:
    assert list(why_text.model_details(model())) == [
        "model         m",
        "next replica  can be placed: barn: needs 4.0 GiB",
        "needs         4.0 GiB (3 files)",
        "replicas      as many as requests need",
        "scaling       hold: as it should be",
    ]


def test_what_is_in_the_way_what_is_wanted_and_how_far_it_is() -> None:
    load = LoadStatus(model="m", state="staging", node="barn", progress=41.2, message="fetching w.gguf")
    told = model(
        decision="no_room",
        text="no node can run m: barn: is offline",
        scaling="unsatisfied",
        scaling_text="no node can run m: barn: is offline",
        kept=("other is pinned",),
        memory_bytes=0,
        selector="tier=fast",
        min_replicas=1,
        load=load,
    )
    lines = list(why_text.model_details(told))
    assert "next replica  no node can run m: barn: is offline" in lines
    assert "scaling       unsatisfied: see above" in lines
    assert "cannot evict  other is pinned" in lines
    assert "needs         unknown amount of memory" in lines
    assert "replicas      1 to any number on nodes with tier=fast" in lines
    assert "load          staging on barn 41%: fetching w.gguf" in lines
    assert "replicas      one on every node" in list(why_text.model_details(model(spread_all=True)))
    loaded = LoadStatus(model="m", state="loaded", progress=100.0)
    assert not [line for line in why_text.model_details(model(load=loaded)) if line.startswith("load")]
    failed = LoadStatus(model="m", state="failed", error="out of memory")
    assert "load          failed: out of memory" in list(why_text.model_details(model(load=failed)))
    resting = LoadStatus(model="m", state="failed", error="out of memory", retry_after_s=39.6)
    words = "load          failed: out of memory; the next attempt starts in 40s"
    assert words in list(why_text.model_details(model(load=resting)))
    waits = model(
        decision="wait",
        text="barn: waits for old to stop",
        load=LoadStatus(model="m", state="pending", message="barn: waits for old to stop"),
    )
    lines_once = list(why_text.model_details(waits))
    assert "next replica  waiting: barn: waits for old to stop" in lines_once
    assert "load          pending: see above" in lines_once
    host = list(why_text.model_details(model(host_bytes=GIB)))
    assert "needs         4.0 GiB, and 1.0 GiB of RAM (3 files)" in host


YES = WhyVerdict(
    node_id="1",
    node="barn",
    model="m",
    eligible=True,
    text="needs 4.0 GiB; GPU 0",
    checks=(WhyCheck(name="memory", ok=True, text="needs 4.0 GiB; GPU 0"),),
    score=(WhyScore(name="in_ram", value="no", meaning="without an accelerator"),),
    notes=("2.0 GiB to fetch",),
)
NO = WhyVerdict(
    node_id="2",
    node="attic",
    model="big",
    eligible=False,
    text="is offline",
    checks=(WhyCheck(name="node", ok=False, text="is offline"),),
)


def test_nodes_and_models_in_rows() -> None:
    assert why_text.verdict_rows(model(nodes=(YES, NO))) == [
        ("barn", "yes, rank 1", "needs 4.0 GiB; GPU 0", "2.0 GiB to fetch"),
        ("attic", "no", "is offline", ""),
    ]
    node = WhyNode(node_id="1", node="barn", accepts=True, text="takes new replicas", models=(NO, YES))
    assert [row[:2] for row in why_text.model_rows(node)] == [("m", "yes"), ("big", "no")]


def test_every_number_when_asked() -> None:
    assert list(why_text.numbers(YES, by="barn")) == [
        "barn",
        "  ok  memory    needs 4.0 GiB; GPU 0",
        "      in_ram      no               without an accelerator",
    ]
    assert list(why_text.numbers(NO, by="attic")) == ["attic", "  no  node      is offline"]


def test_a_node_and_its_memory() -> None:
    node = WhyNode(
        node_id="1", node="barn", accepts=True, text="takes new replicas", budget_bytes=8 * GIB, left_of_budget=2 * GIB
    )
    assert list(why_text.node_details(node)) == [
        "node          barn",
        "new replicas  takes new replicas",
        "budget        2.0 GiB left of 8.0 GiB",
    ]
    known = WhySpace(name="GPU 0", limit_bytes=8 * GIB, free_bytes=0, reserved_bytes=8 * GIB, replicas=1)
    assert why_text.space_row(known) == ("GPU 0", "0 B", "8.0 GiB", "8.0 GiB", "1", "")
    guessed = WhySpace(name="GPU 1", limit_bytes=GIB, free_bytes=GIB, measured=False)
    assert why_text.space_row(guessed)[-1] == "usage is not measured"
    assert why_text.space_row(WhySpace(name="RAM", measured=False)) == ("RAM", "unknown", "unknown", "", "", "")


def test_a_replica_on_trial_is_not_called_an_earlier_one() -> None:
    tried = WhyReplica(node="barn", model="m", replica=0, state="ready", current=False, on_trial=True)
    assert why_text.replica_row(tried)[3] == "ready, new revision on trial"


def test_a_replica() -> None:
    replica = WhyReplica(
        node="barn",
        model="m",
        replica=1,
        state="ready",
        current=False,
        in_flight=2,
        slots=4,
        memory_bytes=GIB,
        devices=(0, 1),
        unused_s=61.4,
        kept="is pinned",
        reason="it fitted",
    )
    assert why_text.replica_row(replica) == (
        "m",
        "barn",
        "1",
        "ready, earlier revision",
        "2 of 4",
        "1.0 GiB on GPU 0, 1",
        "1m1s",
        "is pinned",
        "it fitted",
    )
