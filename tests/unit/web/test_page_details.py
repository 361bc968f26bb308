"""What the pages of one node and of one model show: costs, labels, devices, revisions, snippets, search."""

from __future__ import annotations

import json
import shlex
from datetime import timedelta

from corral.contract.hardware import Device
from corral.contract.labels import BUILT_IN_LABELS, auto_labels
from corral.controller.web.model_details import MAX_DIFF_LINES, diff_of, revision_lines, snippets
from corral.controller.web.node_details import device_lines, drain_cost, history_lines, node_facts
from corral.controller.web.search import Candidate, search
from corral.store.tables.model_revisions import ModelRevision
from corral.store.tables.node_events import StatusChange
from tests.integration.store.rows import NOON, a_replica
from tests.unit.web.test_page_placement_map import GIB, node


def test_draining_says_which_models_lose_their_last_replica() -> None:
    both = [a_replica("barn", "a"), a_replica("loft", "a")]
    assert drain_cost("barn", []) == "No replica is on it."
    assert drain_cost("barn", both) == "1 replica is on it. Each of its models is ready on another node too."
    assert drain_cost("barn", [*both, a_replica("barn", "b")]) == (
        "2 replicas are on it. Ready nowhere else: b; requests for it load again."
    )
    many = [a_replica("barn", name) for name in "abcde"]
    assert drain_cost("barn", many).endswith("Ready nowhere else: a, b, c and 2 more; requests for them load again.")
    starting = a_replica("loft", "a", stage="placed")
    assert "Ready nowhere else: a" in drain_cost("barn", [a_replica("barn", "a"), starting])


def test_own_labels_stand_apart_from_built_in_ones() -> None:
    facts = node_facts(node(labels={"zone": "attic", "platform.os": "linux", "gpu.vendor": "nvidia"}), [])
    assert facts.own_labels == (("zone", "attic"),)
    assert facts.built_in_labels == (("gpu.vendor", "nvidia"), ("platform.os", "linux"))
    made = auto_labels(
        node_name="n", gpu_vendor="v", total_vram=24 * GIB, max_replicas_per_model=1, platform="linux/arm64"
    )
    assert set(made) == BUILT_IN_LABELS


def test_a_device_shows_what_its_driver_tells() -> None:
    told = Device(
        index=1, vendor="nvidia", name="A100", total_bytes=80 * GIB, free_bytes=60 * GIB,
        temperature_c=61, power_w=250, utilisation=0.375, driver="550", mig=2,
    )  # fmt: skip
    known, silent = device_lines((told, Device(index=0, vendor="amd", total_bytes=0)))
    assert (known.name, known.memory) == ("1: A100", "20 / 80 GiB")
    assert (known.temperature, known.power, known.busy) == ("61 °C", "250 W", "38 %")
    assert known.note == "MIG 2 · driver 550"
    assert (silent.name, silent.memory, silent.temperature) == ("0: amd", "not known", "–")


def test_history_is_told_with_ages() -> None:
    (line,) = history_lines([StatusChange("n", NOON, "offline", "no heartbeat")], NOON + timedelta(minutes=5))
    assert (line.status, line.reason, line.ago) == ("offline", "no heartbeat", "5 min ago")


def test_each_revision_shows_what_it_changed() -> None:
    first = {"name": "m", "backend": "llama-cpp", "context_size": 4096}
    kept = [
        ModelRevision("m", 3, NOON, "c" * 64, {**first, "context_size": 8192, "description": "new words"}),
        ModelRevision("m", 2, NOON, "c" * 64, {**first, "context_size": 8192}),
        ModelRevision("m", 1, NOON, "a" * 64, first),
    ]
    newest, second, oldest = revision_lines(kept, NOON)
    assert newest.words == "+1 −0 lines, nothing that a process notices"
    assert second.words == "+1 −1 lines"
    assert [(line.css, line.text) for line in second.diff if line.css] == [
        ("removed", "-context_size: 4096"),
        ("added", "+context_size: 8192"),
    ]
    assert (oldest.words, oldest.diff, oldest.revision) == ("the oldest revision on record", (), "a" * 12)


def test_a_long_diff_is_cut() -> None:
    before, after = "\n".join(f"a{i}" for i in range(500)), "\n".join(f"b{i}" for i in range(500))
    assert len(diff_of(before, after)) == MAX_DIFF_LINES


def test_snippets_take_any_name() -> None:
    name = 'org/it\'s "odd"'
    by_title = {each.title: each.text for each in snippets(name, "https://corral.local")}
    assert shlex.split(by_title["Command line"])[2] == name
    words = shlex.split(by_title["curl"].replace("\\\n", " "))
    assert words[1] == "https://corral.local/v1/chat/completions"
    assert json.loads(words[-1])["model"] == name
    compile(by_title["Python"], "snippet", "exec")
    assert f"model: {json.dumps(name)}," in by_title["JavaScript"]


def test_search_finds_names_first_and_every_word() -> None:
    known = [
        Candidate("Node", "barn", "/nodes/barn", "linux/amd64", more="tier=fast"),
        Candidate("Node", "fast-barn", "/nodes/fast-barn"),
        Candidate("Model", "barn-owl", "/models/barn-owl", "llama-cpp"),
        Candidate("Model", "other", "/models/other", "llama-cpp"),
    ]
    groups = search(known, "barn", 10)
    assert [(group.kind, [hit.name for hit in group.hits]) for group in groups] == [
        ("Node", ["barn", "fast-barn"]),
        ("Model", ["barn-owl"]),
    ]
    assert [hit.name for hit in search(known, "FAST barn", 10)[0].hits] == ["fast-barn", "barn"]
    assert [(group.more, len(group.hits)) for group in search(known, "llama", 1)] == [(1, 1)]
    assert search(known, "", 10) == ()
