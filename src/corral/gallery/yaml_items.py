"""Reads the items of a YAML list that strangers wrote. Pure.

Built on the parser's events rather than on a ready-made loader, for three reasons. Text stays text (`version: 1.10` is
not 1.1), unless the reader asks for numbers and truth values, as a model's definition has them. One bad item costs that
item, never the list. And nothing a list can contain takes long: depth, length, the size of an item with all its aliases
written out, and the work of merging are bounded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias

import yaml

from corral.kit.errors import Invalid

_MERGE = "tag:yaml.org,2002:merge"
_PLAIN_TAGS = {
    f"tag:yaml.org,2002:{name}" for name in ("str", "int", "float", "bool", "null", "timestamp", "map", "seq")
}
_NULLS = {"", "~", "null", "Null", "NULL"}
_UNPRINTABLE = re.compile(r"[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010ffff]")
_ITEM = re.compile(r"( *)-(?:\s|$)")
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

# As YAML 1.2 has them. Not 1.1's yes, no, on and off, nor its numbers with leading zeros: those are text.
_TRUTH = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_WHOLE = re.compile(r"[-+]?(?:0|[1-9][0-9]{0,17})\Z|0x[0-9a-fA-F]{1,15}\Z")
_DECIMAL = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]{1,3})?\Z")

Value: TypeAlias = "str | int | float | bool | list[Value] | dict[str, Value] | None"


@dataclass(frozen=True, slots=True)
class Limits:
    bytes: int = 32 << 20
    events: int = 3_000_000
    merged: int = 5_000_000  # keys copied by merging, in all
    depth: int = 24
    weight: int = 20_000  # nodes of one item, aliases written out
    repairs: int = 20  # items cut out because they are not YAML


LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class Problem:
    """Why an item was left out."""

    line: int  # from 1; 0 where nobody can say
    reason: str
    name: str = ""

    def __str__(self) -> str:
        who = f"{self.name!r} " if self.name else ""
        return f"{who}(line {self.line}): {self.reason}"


@dataclass(frozen=True, slots=True)
class Item:
    line: int
    value: dict[str, Value]


@dataclass(frozen=True, slots=True)
class Items:
    items: tuple[Item, ...]
    problems: tuple[Problem, ...]


def read_items(
    body: bytes, limits: Limits = LIMITS, *, typed: bool = False, single: bool = False, exact: bool = False
) -> Items:
    """Raises Invalid only when there is no list at all, or one too big to look at. `single`: a mapping by itself counts
    as a list of one. `exact`: a key said twice and a second document are faults, as with what people here write for us:
    one of the two would be lost without a word. In strangers' lists the last of them counts, and the first document."""
    if len(body) > limits.bytes:
        raise Invalid(f"the index has {len(body)} bytes; at most {limits.bytes} are read")
    lines = _UNPRINTABLE.sub("\ufffd", body.decode("utf-8-sig", errors="replace")).splitlines()
    cut: list[Problem] = []
    rewritten = False
    while True:
        try:
            composer = _Composer("\n".join(lines), limits, typed=typed, exact=exact, rewritten=rewritten)
            items, problems = composer.read(single=single)
            return Items(tuple(items), tuple(sorted((*cut, *problems), key=lambda problem: problem.line)))
        except _NotYaml as fault:
            if fault.escape and not rewritten and (written := _without_quote_escapes(lines)) is not None:
                lines, rewritten = written, True
                continue
            if single and not _begins_with_an_item(lines):
                raise Invalid(f"this is not YAML: {fault.reason} (line {fault.line + 1})") from fault
            if len(cut) == limits.repairs:
                raise Invalid(f"more than {limits.repairs} entries are not YAML; the last: {fault.reason}") from fault
            cut.append(Problem(_cut_item(lines, fault) + 1, fault.reason))


# Go's YAML library knows the escape \' in double quotes, YAML itself does not; indexes made for LocalAI have it. It is
# rewritten as an escape that YAML knows. In other kinds of scalar (a block of text that quotes YAML) the rewriting is
# undone when the scalar has been read; the longest escape is taken because nobody writes it.
_QUOTED = re.compile(r'(?:^|(?<=[\s\[{,:]))"(?:[^"\\]|\\.)*+"', re.DOTALL | re.MULTILINE)
_QUOTE_ESCAPE = re.compile(r"(\\\\)|\\'")  # two backslashes are one, and escape nothing after them
_LONG_ESCAPE = "\\U00000027"


def _without_quote_escapes(lines: list[str]) -> list[str] | None:
    """None: there are none, or it could not be undone."""
    text = "\n".join(lines)
    if _LONG_ESCAPE in text:
        return None

    def rewrite(quoted: re.Match[str]) -> str:
        return _QUOTE_ESCAPE.sub(lambda found: found[1] or _LONG_ESCAPE, quoted[0])

    written = _QUOTED.sub(rewrite, text)
    return written.split("\n") if written != text else None


def _begins_with_an_item(lines: list[str]) -> bool:
    """A list may lose an item; a mapping by itself is whole or nothing."""
    first = next((line for line in lines if line.strip() and not line.lstrip().startswith(("#", "---", "%"))), "")
    return _ITEM.match(first) is not None


class _NotYaml(Exception):
    escape = False  # a backslash before something that needs none, in double quotes

    def __init__(self, line: int, reason: str) -> None:
        super().__init__(reason)
        self.line = line
        self.reason = reason


def _fault(error: yaml.YAMLError) -> _NotYaml:
    context, problem = getattr(error, "context", None) or "", getattr(error, "problem", None) or str(error)
    mark = getattr(error, "problem_mark", None)
    if "quoted scalar" in context or "flow" in context:
        # What was opened and never closed is noticed far below; the fault is where it was opened.
        mark = getattr(error, "context_mark", None) or mark
    fault = _NotYaml(mark.line if mark is not None else 0, problem)
    fault.escape = "unknown escape" in problem
    return fault


def _cut_item(lines: list[str], fault: _NotYaml) -> int:
    """Blanks the item the fault is in (so that line numbers stay) and says where it began."""
    starts = [found for found in map(_ITEM.match, lines) if found]
    indent = starts[0][1] if starts else ""
    begins = [number for number, line in enumerate(lines) if (m := _ITEM.match(line)) and m[1] == indent]
    before = [number for number in begins if number <= fault.line]
    if not before:
        raise Invalid(f"the index is not a YAML list: {fault.reason} (line {fault.line + 1})") from fault
    begin = before[-1]
    end = next((number for number in begins if number > begin), len(lines))
    lines[begin:end] = [""] * (end - begin)
    return begin


@dataclass(slots=True)
class _Node:
    """A value, how many nodes it is when written out, and what is wrong with it, if anything is."""

    value: Value = None
    weight: int = 1
    pairs: dict[str, _Node] | None = None  # of a mapping
    items: list[_Node] | None = None  # of a sequence
    bad: str = ""


class _Composer:
    def __init__(self, text: str, limits: Limits, *, typed: bool, exact: bool, rewritten: bool = False) -> None:
        self._limits = limits
        self._typed = typed
        self._exact = exact
        self._rewritten = rewritten
        self._events = self._parse(text)
        self._anchors: dict[str, _Node] = {}
        self._merged = 0

    def read(self, *, single: bool) -> tuple[list[Item], list[Problem]]:
        found = self._document(single=single)
        for event in self._events if self._exact else ():
            if isinstance(event, yaml.DocumentStartEvent) and not _is_null(next(self._events)):
                raise Invalid(f"a second document begins in line {_line(event)}, and only one is read: write it as one")
        return found

    def _document(self, *, single: bool) -> tuple[list[Item], list[Problem]]:
        items: list[Item] = []
        problems: list[Problem] = []
        event = next(self._events)
        while isinstance(event, yaml.StreamStartEvent | yaml.DocumentStartEvent):
            event = next(self._events)
        if isinstance(event, yaml.StreamEndEvent) or _is_null(event):
            return items, problems
        if single and isinstance(event, yaml.MappingStartEvent):
            self._take(event, items, problems)
            return items, problems
        if not isinstance(event, yaml.SequenceStartEvent):
            raise Invalid("a definition is a mapping of keys to values" if single else "the index is not a YAML list")
        while not isinstance(event := next(self._events), yaml.SequenceEndEvent):
            self._take(event, items, problems)
        return items, problems

    def _take(self, event: yaml.Event, items: list[Item], problems: list[Problem]) -> None:
        line = _line(event)
        node = self._node(event, 1)
        if node.bad:
            problems.append(Problem(line, node.bad, _name(node)))
        elif not isinstance(node.value, dict):
            problems.append(Problem(line, "an entry is a mapping with a name"))
        else:
            items.append(Item(line, node.value))

    def _parse(self, text: str) -> Iterator[yaml.Event]:
        try:
            for count, event in enumerate(yaml.parse(text, Loader=_Loader)):
                if count > self._limits.events:
                    raise Invalid(f"the index has more than {self._limits.events} parts")
                if self._rewritten and isinstance(event, yaml.ScalarEvent) and event.style != '"':
                    event.value = event.value.replace(_LONG_ESCAPE, "\\'")
                yield event
        except yaml.YAMLError as error:
            raise _fault(error) from error

    def _node(self, event: yaml.Event, depth: int) -> _Node:
        if depth > self._limits.depth:
            # Not read on to its end: the parser takes quadratic time for brackets within brackets.
            raise _NotYaml(_line(event) - 1, f"nested deeper than {self._limits.depth}")
        if isinstance(event, yaml.AliasEvent):
            return self._anchors.get(event.anchor or "") or _Node(bad=f"refers to *{event.anchor}, which is not there")
        node = self._compose(event, depth)
        if not node.bad and node.weight > self._limits.weight:
            node = _Node(bad=f"has more than {self._limits.weight} parts")
        if anchor := getattr(event, "anchor", None):
            # After its content: what refers to itself refers to nothing.
            self._anchors[anchor] = node
        return node

    def _compose(self, event: yaml.Event, depth: int) -> _Node:
        if isinstance(event, yaml.ScalarEvent):
            return _scalar(event, typed=self._typed)
        node = self._sequence(depth) if isinstance(event, yaml.SequenceStartEvent) else self._mapping(depth)
        if not node.bad and not _is_plain(event):
            node.bad = f"has the tag {getattr(event, 'tag', None)}"
        return node

    def _sequence(self, depth: int) -> _Node:
        children: list[_Node] = []
        while not isinstance(event := next(self._events), yaml.SequenceEndEvent):
            children.append(self._node(event, depth + 1))
        return _Node(
            [child.value for child in children if child.value is not None],
            1 + sum(child.weight for child in children),
            items=children,
            bad=next((child.bad for child in children if child.bad), ""),
        )

    def _mapping(self, depth: int) -> _Node:
        pairs: dict[str, _Node] = {}
        sources: list[dict[str, _Node]] = []
        bad = ""
        while not isinstance(event := next(self._events), yaml.MappingEndEvent):
            is_merge = _is_merge(event)
            key = _Node("<<") if is_merge else self._key(event, depth + 1)
            child = self._node(inner := next(self._events), depth + 1)
            bad = bad or key.bad or child.bad
            if is_merge:
                mappings = _mappings_of(child)
                sources += mappings or []
                bad = bad or ("" if mappings is not None else f"merges what is no mapping (line {_line(inner)})")
            elif isinstance(key.value, str):
                if self._exact and key.value in pairs:
                    raise _NotYaml(_line(event) - 1, f"the key {key.value[:200]!r} is there twice")
                pairs[key.value] = child
            else:
                bad = bad or "has a key that is not text"
        if bad:
            return _Node(bad=bad, pairs=pairs)
        return self._merge(pairs, sources)

    def _key(self, event: yaml.Event, depth: int) -> _Node:
        """Always text: `1: one` has the key "1"."""
        node = self._node(event, depth)
        return (
            replace(node, value=event.value) if isinstance(event, yaml.ScalarEvent) and node.value is not None else node
        )

    def _merge(self, pairs: dict[str, _Node], sources: list[dict[str, _Node]]) -> _Node:
        """A mapping's own keys win, then those of the source that stands first."""
        for source in sources:
            self._merged += len(source)
            if self._merged > self._limits.merged:
                raise Invalid(f"merging the index's entries copies more than {self._limits.merged} keys")
            for key, child in source.items():
                pairs.setdefault(key, child)
        weight = 1 + sum(child.weight for child in pairs.values())
        return _Node({key: child.value for key, child in pairs.items() if child.value is not None}, weight, pairs)


def _scalar(event: yaml.ScalarEvent, *, typed: bool) -> _Node:
    if not _is_plain(event):
        return _Node(bad=f"has the tag {event.tag}")
    if _is_null(event):
        return _Node(None)
    return _Node(typed_value(event.value) if typed and event.implicit[0] and event.tag is None else event.value)


def typed_value(text: str) -> str | int | float | bool:
    """What a plain scalar means."""
    if text in _TRUTH:
        return _TRUTH[text]
    if _WHOLE.match(text):
        return int(text, 0) if "x" in text else int(text)
    if _DECIMAL.match(text) and any(letter in text for letter in ".eE"):
        return float(text)
    return text


def _is_null(event: yaml.Event) -> bool:
    return isinstance(event, yaml.ScalarEvent) and bool(event.implicit[0]) and event.value in _NULLS


def _is_plain(event: yaml.Event) -> bool:
    tag = getattr(event, "tag", None)
    return tag is None or tag == "!" or tag in _PLAIN_TAGS


def _is_merge(event: yaml.Event) -> bool:
    if not isinstance(event, yaml.ScalarEvent):
        return False
    return event.tag == _MERGE or (event.tag is None and event.value == "<<" and bool(event.implicit[0]))


def _mappings_of(node: _Node) -> list[dict[str, _Node]] | None:
    """What a merge key brings in: one mapping or a list of them; None if it is neither."""
    candidates = [node] if node.items is None else node.items
    mappings = [each.pairs for each in candidates if each.pairs is not None]
    return mappings if len(mappings) == len(candidates) else None


def _line(event: yaml.Event) -> int:
    return event.start_mark.line + 1 if event.start_mark is not None else 0


def _name(node: _Node) -> str:
    found = node.pairs.get("name") if node.pairs else None
    return found.value if found is not None and isinstance(found.value, str) else ""
