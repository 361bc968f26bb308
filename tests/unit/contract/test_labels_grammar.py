"""Labels and selectors (docs/reference/wire/budgets-and-labels.md#labels)."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corral.contract.labels import (
    auto_labels,
    check_label,
    parse_labels,
    parse_selector,
    selector_of_map,
    vram_bucket,
)

GIB = 1024**3
KEYS = st.text(
    st.characters(codec="utf-8", exclude_categories=["C", "Z"], exclude_characters=",=!"), min_size=1
).filter(lambda key: len(key) <= 128)
VALUES = st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"], exclude_characters=","), max_size=255)


@pytest.mark.parametrize(
    ("text", "labels"),
    [
        ("", {}),
        (" , ,", {}),
        ("tier=fast", {"tier": "fast"}),
        (" tier = fast , gpu=a100 ,", {"tier": "fast", "gpu": "a100"}),
        ("a=b=c", {"a": "b=c"}),
        ("a=", {"a": ""}),
        ("a=1,a=2", {"a": "2"}),
        ("k" * 128 + "=" + "v" * 255, {"k" * 128: "v" * 255}),
    ],
)
def test_labels_are_trimmed_pairs(text: str, labels: dict[str, str]) -> None:
    assert parse_labels(text) == labels


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tier", "'tier' is not a label; write key=value"),
        ("=fast", "has no key"),
        ("a=1, =2", "has no key"),
        ("k" * 129 + "=v", "has 129 characters; at most 128"),
        ("k=" + "v" * 256, "has 256 characters; at most 255"),
        ("k=a\x1b[2Jb", "control characters"),
        ("k\x00=v", "control characters"),
    ],
)
def test_bad_labels_are_refused_in_words(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_labels(text)


def test_a_label_from_json_is_checked_the_same_way() -> None:
    check_label("node.name", "größe 東京")
    with pytest.raises(ValueError, match="no key"):
        check_label("  ", "x")


@pytest.mark.parametrize(
    ("total", "bucket"),
    [
        (0, ""),
        (1, "0GB"),
        (4 * GIB, "4GB"),
        (8 * GIB - 1, "7GB"),
        (8 * GIB, "8GB"),
        (16 * GIB - 1, "8GB"),
        (16 * GIB, "16GB"),
        (24 * GIB, "24GB"),
        (47 * GIB, "24GB"),
        (48 * GIB, "48GB"),
        (80 * GIB - 1, "48GB"),
        (80 * GIB, "80GB+"),
        (150754820096, "80GB+"),
    ],
)
def test_vram_is_put_into_buckets(total: int, bucket: str) -> None:
    assert vram_bucket(total) == bucket


def test_every_node_gets_its_auto_labels() -> None:
    assert auto_labels(
        node_name="w1", gpu_vendor="nvidia", total_vram=24 * GIB, max_replicas_per_model=4, platform="linux/arm64"
    ) == {
        "gpu.vendor": "nvidia",
        "gpu.vram": "24GB",
        "node.name": "w1",
        "node.replica-slots": "4",
        "platform.os": "linux",
        "platform.arch": "arm64",
    }


def test_labels_about_what_is_not_there_are_left_out() -> None:
    labels = auto_labels(node_name="w1", gpu_vendor="", total_vram=0, max_replicas_per_model=0)
    assert labels == {"node.name": "w1", "node.replica-slots": "1"}


LABELS = {"tier": "fast", "gpu.vendor": "nvidia", "empty": ""}


@pytest.mark.parametrize(
    ("selector", "matches"),
    [
        ("", True),
        ("tier=fast", True),
        ("tier=slow", False),
        ("tier=fast,gpu.vendor=nvidia", True),
        ("tier=fast , gpu.vendor = amd", False),
        ("tier", True),
        ("rack", False),
        ("empty", True),
        ("empty=", True),
        ("tier=", False),
        ("gpu.vendor!=amd", True),
        ("gpu.vendor != nvidia", False),
        ("rack!=b2", True),
        ("tier=fast,rack", False),
    ],
)
def test_all_terms_of_a_selector_must_hold(selector: str, matches: bool) -> None:
    assert parse_selector(selector).matches(LABELS) is matches


@pytest.mark.parametrize("text", ["=fast", "!=fast", ",tier=fast, =x", "k" * 129])
def test_a_selector_without_a_usable_key_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="selects nothing"):
        parse_selector(text)


def test_a_selector_says_why_a_node_does_not_match() -> None:
    selector = parse_selector("tier=slow,rack,gpu.vendor!=nvidia,empty")
    assert selector.why_not(LABELS) == (
        "tier=slow: has 'fast'",
        "rack: has no such label",
        "gpu.vendor!=nvidia: has 'nvidia'",
    )
    assert parse_selector("tier").why_not(LABELS) == ()


@settings(deadline=None)  # the machine may be busy
@given(st.dictionaries(KEYS, VALUES, max_size=4))
def test_labels_survive_being_written_and_read(labels: dict[str, str]) -> None:
    assert parse_labels(",".join(f"{key}={value}" for key, value in labels.items())) == labels


@settings(deadline=None)  # the machine may be busy
@given(st.dictionaries(KEYS, VALUES, max_size=4), st.dictionaries(KEYS, VALUES, max_size=4))
def test_a_map_selects_nodes_that_have_at_least_its_labels(wanted: dict[str, str], more: dict[str, str]) -> None:
    selector = selector_of_map(wanted)
    assert selector.matches({**more, **wanted})
    assert selector.matches(more) == (wanted.items() <= more.items())
    assert selector.matches(more) == (selector.why_not(more) == ())
    assert parse_selector(str(selector)) == selector


@settings(deadline=None)  # the machine may be busy
@given(st.text(max_size=60))
def test_any_text_is_a_selector_or_a_value_error(text: str) -> None:
    try:
        selector = parse_selector(text)
    except ValueError:
        return
    assert parse_selector(str(selector)) == selector
