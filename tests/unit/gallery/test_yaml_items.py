"""Reading lists that strangers wrote: one bad item costs that item, and nothing takes long."""

from __future__ import annotations

import contextlib
import time

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from corral.gallery.yaml_items import LIMITS, Items, Limits, read_items
from corral.kit.errors import Invalid


def read(text: str) -> Items:
    return read_items(text.encode())


def values(text: str) -> list[object]:
    got = read(text)
    assert not got.problems
    return [item.value for item in got.items]


def test_anchors_and_both_spellings_of_merging() -> None:
    assert values(
        """
- &base
  name: base
  tags: [a, b]
  uri: x
- <<: *base
  name: plain
- !!merge <<: *base
  name: tagged
  uri: y
"""
    ) == [
        {"name": "base", "tags": ["a", "b"], "uri": "x"},
        {"name": "plain", "tags": ["a", "b"], "uri": "x"},
        {"name": "tagged", "tags": ["a", "b"], "uri": "y"},
    ]


def test_own_keys_win_then_the_first_of_several_sources() -> None:
    assert values("- &a {x: 1, y: 1}\n- &b {y: 2, z: 2}\n- {<<: [*a, *b], z: 3}")[-1] == {"x": "1", "y": "1", "z": "3"}
    assert values("- &a {x: 1}\n- &b {x: 2}\n- {<<: *a, <<: *b}")[-1] == {"x": "1"}


def test_merging_is_transitive_and_before_or_after_makes_no_difference() -> None:
    assert values("- &a {x: 1, k: a}\n- &b {<<: *a, k: b}\n- k: c\n  <<: *b")[-1] == {"x": "1", "k": "c"}


def test_an_own_null_takes_away_what_was_merged() -> None:
    assert values("- &a {name: a, uri: x}\n- {<<: *a, uri: ~}\n- {<<: *a, uri: }")[1:] == [{"name": "a"}, {"name": "a"}]


def test_the_escaped_quote_of_gos_yaml() -> None:
    r"""LocalAI's indexes have "\'", which Go's library reads as a quote and YAML does not know."""
    text = r"""
- key: "\'"
  both: "a \" and \' and \\' and \\\'"
  list: ["\'", 'plain \', "x\'y"]
  plain: it\'s
  block: |
    key: "\'"
- name: other
  folded: "one \'
    two"
"""
    first, second = values(text)
    assert first == {
        "key": "'",
        "both": "a \" and ' and \\' and \\'",
        "list": ["'", "plain \\", "x'y"],
        "plain": "it\\'s",
        "block": 'key: "\\\'"\n',
    }
    assert second == {"name": "other", "folded": "one ' two"}


def test_other_escapes_that_yaml_does_not_know_cost_their_item() -> None:
    got = read('- {name: a, x: "\\q"}\n- {name: b, y: "\\\'"}\n')
    assert [item.value for item in got.items] == [{"name": "b", "y": "'"}]
    assert [(problem.line, problem.reason) for problem in got.problems] == [(1, "found unknown escape character")]


def test_text_stays_text() -> None:
    assert values("- {version: 1.10, yes: yes, date: 2026-01-02, octal: 010, quoted: '~', n: null}") == [
        {"version": "1.10", "yes": "yes", "date": "2026-01-02", "octal": "010", "quoted": "~"}
    ]


def test_a_quoted_merge_key_is_a_key() -> None:
    assert values("- {'<<': 3}") == [{"<<": "3"}]


@pytest.mark.parametrize("text", ["", "\n# nothing\n", "~", "---\n...\n", "[]"])
def test_an_empty_list(text: str) -> None:
    assert read(text) == Items((), ())


@pytest.mark.parametrize("text", ["a: b", "text", "<html><body>Sign in</body></html>", "a: b: c", "{", '"'])
def test_no_list_at_all(text: str) -> None:
    with pytest.raises(Invalid):
        read(text)


@pytest.mark.parametrize(
    ("broken", "word"),
    [
        ('uri: "never closed', "unexpected end"),
        ("uri: [never, closed", "did not find"),
        ("a: b: c", "mapping values"),
        ("\turi: x", "tab"),
        ("x: @at", "character"),
        ("x: %y", "character"),
        ("ref: *nowhere", "*nowhere"),
        ("me: &me [*me]", "*me"),
        ("x: !!python/object/apply:os.system [ls]", "tag"),
        ("x: !!binary aGk=", "tag"),
        ("? [a, b]\n  : c", "key"),
        ("<<: text", "merges"),
        ("<<: [{a: b}, text]", "merges"),
        ("x: " + "[" * 200, "deeper"),
        ("x: " + "[" * 20 + "*" + "]" * 20, "alpha"),
    ],
)
def test_a_broken_item_costs_itself_only(broken: str, word: str) -> None:
    got = read(f"# head\n- name: before\n- name: broken\n  {broken}\n- name: after\n  uri: x\n")
    assert [item.value["name"] for item in got.items] == ["before", "after"]
    (problem,) = got.problems
    assert problem.line == 3
    assert word in problem.reason


def test_an_item_that_is_no_mapping() -> None:
    got = read("- name: a\n- just text\n- [x]\n-\n- name: b\n")
    assert [item.value["name"] for item in got.items] == ["a", "b"]
    assert [problem.line for problem in got.problems] == [2, 3, 4]


def test_who_relies_on_a_broken_item_is_told_so() -> None:
    got = read('- &base\n  name: base\n  uri: "open\n- <<: *base\n  name: heir\n- name: fine\n')
    assert [item.value["name"] for item in got.items] == ["fine"]
    assert [str(problem) for problem in got.problems] == [
        "(line 1): found unexpected end of stream",
        "'heir' (line 4): refers to *base, which is not defined",
    ]


def test_items_may_be_indented_and_comments_may_stand_anywhere() -> None:
    got = read("  # list\n  - name: a\n    # inside\n  - name: b\n    x: b: c\n  - name: c\n")
    assert [item.value["name"] for item in got.items] == ["a", "c"]


def test_bytes_nobody_can_print_are_no_obstacle() -> None:
    got = read_items(b"- name: a\n  description: \x00\x07\xff\xfe bell\n")
    assert got.items[0].value == {"name": "a", "description": "\ufffd\ufffd\ufffd\ufffd bell"}
    assert read_items("\ufeff- name: a\n".encode()).items[0].value == {"name": "a"}


def quick(text: str, limits: Limits = LIMITS) -> Items:
    began = time.process_time()
    try:
        return read_items(text.encode(), limits)
    finally:
        assert time.process_time() - began < 10


def test_a_billion_laughs() -> None:
    layers = [f"- &l{i} {{name: l{i}, x: [{', '.join([f'*l{i - 1}'] * 10)}]}}\n" for i in range(1, 30)]
    got = quick("- &l0 {name: l0, x: [ha, ha, ha]}\n" + "".join(layers) + "- name: fine\n")
    assert [item.value["name"] for item in got.items] == ["l0", "l1", "l2", "l3", "fine"]
    assert {"has more than 20000 parts"} == {problem.reason for problem in got.problems}


def test_laughs_by_merging() -> None:
    wide = "- &w {" + ", ".join(f"k{i}: v" for i in range(15_000)) + "}\n"
    with pytest.raises(Invalid, match="merging"):
        quick(wide + "- <<: *w\n" * 2_000)


def test_brackets_without_end() -> None:
    assert quick("- name: a\n- x: " + "[" * 2_000_000).problems[0].reason == "nested deeper than 24"
    assert quick("- " * 1_000_000).items == ()


def test_too_much_of_anything() -> None:
    with pytest.raises(Invalid, match="bytes"):
        quick("- a: b\n" * 10, Limits(bytes=20))
    with pytest.raises(Invalid, match="parts"):
        quick("- a: b\n" * 1000, Limits(events=100))
    with pytest.raises(Invalid, match="more than 3 entries"):
        quick("- a: b: c\n" * 5, Limits(repairs=3))
    assert len(quick("- a: b: c\n" * 3, Limits(repairs=3)).problems) == 3


TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs")), max_size=8)
TREES = st.recursive(
    TEXTS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3), max_leaves=8
)


@given(st.lists(st.dictionaries(TEXTS, TREES, min_size=1, max_size=4), max_size=4), st.booleans())
def test_what_a_real_writer_writes_is_read_back(items: list[dict[str, object]], flow: bool) -> None:
    text = yaml.safe_dump(items, default_flow_style=flow, allow_unicode=True)
    got = read(text)
    assert [item.value for item in got.items] == items


@given(st.binary(max_size=300))
def test_no_bytes_raise_anything_but_invalid(body: bytes) -> None:
    with contextlib.suppress(Invalid):
        read_items(body)


@given(st.text(alphabet="-:&*<[]{}!#'\"|>%@ \n\tab", max_size=60))
def test_no_yaml_like_text_raises_anything_but_invalid(text: str) -> None:
    with contextlib.suppress(Invalid):
        read("- name: a\n" + text)


def test_numbers_and_truth_values_where_they_are_asked_for() -> None:
    text = (
        b"a: 1\nb: '1'\nc: true\nd: 0.5\ne: 1e3\nf: yes\ng: 007\nh: 1.10.1\ni: 0x10\nj: ~\nk: -3\n7: x\n"
        b"l: 9999999999999999999999\n"
    )
    [item] = read_items(text, typed=True, single=True).items
    assert item.value == {
        "a": 1,
        "b": "1",
        "c": True,
        "d": 0.5,
        "e": 1000.0,
        "f": "yes",
        "g": "007",
        "h": "1.10.1",
        "i": 16,
        "k": -3,
        "7": "x",
        "l": "9999999999999999999999",
    }
    assert type(item.value["c"]) is bool


def test_a_mapping_by_itself_is_whole_or_nothing() -> None:
    with pytest.raises(Invalid, match=r"this is not YAML: .* \(line"):
        read_items(b"# words\n---\na: 1\nfiles:\n  - [\n  - b\n", single=True)
    with pytest.raises(Invalid, match="not a YAML list"):
        read_items(b"a: 1\n")
    kept = read_items(b"- a: 1\n- a: @\n- b: 2\n", single=True)
    assert [item.value for item in kept.items] == [{"a": "1"}, {"b": "2"}]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: 1\nb: 2\na: 3\n", r"the key 'a' is repeated \(line 3\)"),
        ("x: {a: 1, a: 1}\n", "the key 'a' is repeated"),
        ("a: 1\n---\nb: 2\n", "a second document begins in line 2"),
        ("---\n---\nb: 2\n", "a second document begins in line 2"),
    ],
)
def test_of_what_people_here_wrote_nothing_is_passed_over(text: str, words: str) -> None:
    with pytest.raises(Invalid, match=words):
        read_items(text.encode(), single=True, exact=True)
    assert len(read_items(text.encode(), single=True).items) <= 1, "a stranger's list is read as far as it can be"


def test_what_is_said_once_is_exact() -> None:
    text = b"---\na: &x {b: 1}\nc: {<<: *x, b: 2}\n---\n...\n"
    assert read_items(text, single=True, exact=True).items[0].value == {"a": {"b": "1"}, "c": {"b": "2"}}
    kept = read_items(b"- {a: 1}\n- {b: 1, b: 2}\n- {c: 1}\n", single=True, exact=True)
    assert [item.value for item in kept.items] == [{"a": "1"}, {"c": "1"}]
    assert [str(problem) for problem in kept.problems] == ["(line 2): the key 'b' is repeated"]
