"""Reads the items of an untrusted YAML list. Pure.

It uses the parser's events instead of a loader, for three reasons. Text stays text (`version: 1.10` is not 1.1), unless
the caller wants numbers and booleans, as in a model's definition. One invalid item costs only that item, not the list.
And no input takes long: depth, length, the size of an item with its aliases expanded, and the work of merging are
limited.
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

# As in YAML 1.2. The yes, no, on and off of YAML 1.1 and its numbers with leading zeros are text.
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
    weight: int = 20_000  # nodes of one item, with aliases expanded
    repairs: int = 20  # items removed because they are not YAML


LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class Problem:
    """Why an item was ignored."""

    line: int  # from 1; 0: unknown
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
    """Raises Invalid only if there is no list at all, or if it is too large. `single`: a single mapping counts as a
    list of one. `exact`: a repeated key and a second document are errors, for input that users write for Corral: one of
    the two would be lost silently. Otherwise the last of the repeated keys counts, and the first document."""
    if len(body) > limits.bytes:
        raise Invalid(f"the index has {len(body)} bytes; the limit is {limits.bytes}")
    lines = _UNPRINTABLE.sub("\ufffd", body.decode("utf-8-sig", errors="replace")).splitlines()
    cut: list[Problem] = []
    rewritten = False
    while True:
        try:
            composer = _Composer("\n".join(lines), limits, typed=typed, exact=exact, rewritten=rewritten)
            items, problems = composer.read(single=single)
            return Items(tuple(items), tuple(sorted((*cut, *problems), key=lambda problem: problem.line)))
        except _SyntaxFault as fault:
            if fault.escape and not rewritten and (written := _without_quote_escapes(lines)) is not None:
                lines, rewritten = written, True
                continue
            if single and not _begins_with_an_item(lines):
                raise Invalid(f"this is not YAML: {fault.reason} (line {fault.line + 1})") from fault
            if len(cut) == limits.repairs:
                raise Invalid(f"more than {limits.repairs} entries are not YAML; the last: {fault.reason}") from fault
            cut.append(Problem(_cut_item(lines, fault) + 1, fault.reason))


# Go's YAML library accepts the escape \' in double quotes, YAML does not; indexes made for LocalAI contain it. It is
# rewritten to an escape that YAML has. In other kinds of scalar (a block of text that quotes YAML) the rewriting is
# undone after the scalar was read; the longest form of the escape is used because no author writes it.
_QUOTED = re.compile(r'(?:^|(?<=[\s\[{,:]))"(?:[^"\\]|\\.)*+"', re.DOTALL | re.MULTILINE)
_QUOTE_ESCAPE = re.compile(r"(\\\\)|\\'")  # two backslashes are an escaped backslash
_LONG_ESCAPE = "\\U00000027"


def _without_quote_escapes(lines: list[str]) -> list[str] | None:
    """None: there are no such escapes, or the rewriting could not be undone."""
    text = "\n".join(lines)
    if _LONG_ESCAPE in text:
        return None

    def rewrite(quoted: re.Match[str]) -> str:
        return _QUOTE_ESCAPE.sub(lambda found: found[1] or _LONG_ESCAPE, quoted[0])

    written = _QUOTED.sub(rewrite, text)
    return written.split("\n") if written != text else None


def _begins_with_an_item(lines: list[str]) -> bool:
    """A list may lose an item; a single mapping may not lose anything."""
    first = next((line for line in lines if line.strip() and not line.lstrip().startswith(("#", "---", "%"))), "")
    return _ITEM.match(first) is not None


class _SyntaxFault(Exception):
    escape = False  # an unknown escape in double quotes

    def __init__(self, line: int, reason: str) -> None:
        super().__init__(reason)
        self.line = line
        self.reason = reason


def _fault(error: yaml.YAMLError) -> _SyntaxFault:
    context, problem = getattr(error, "context", None) or "", getattr(error, "problem", None) or str(error)
    mark = getattr(error, "problem_mark", None)
    if "quoted scalar" in context or "flow" in context:
        # An unclosed quote or bracket is noticed far below; report the place where it was opened.
        mark = getattr(error, "context_mark", None) or mark
    fault = _SyntaxFault(mark.line if mark is not None else 0, problem)
    fault.escape = "unknown escape" in problem
    return fault


def _cut_item(lines: list[str], fault: _SyntaxFault) -> int:
    """Blank the lines of the item with the fault (so that line numbers stay). Returns its first line."""
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
class _YamlNode:
    """A value, its number of nodes with aliases expanded, and its error, if there is one."""

    value: Value = None
    weight: int = 1
    pairs: dict[str, _YamlNode] | None = None  # of a mapping
    items: list[_YamlNode] | None = None  # of a sequence
    bad: str = ""


class _Composer:
    def __init__(self, text: str, limits: Limits, *, typed: bool, exact: bool, rewritten: bool = False) -> None:
        self._limits = limits
        self._typed = typed
        self._exact = exact
        self._rewritten = rewritten
        self._events = self._parse(text)
        self._anchors: dict[str, _YamlNode] = {}
        self._merged = 0

    def read(self, *, single: bool) -> tuple[list[Item], list[Problem]]:
        found = self._document(single=single)
        for event in self._events if self._exact else ():
            if isinstance(event, yaml.DocumentStartEvent) and not _is_null(next(self._events)):
                raise Invalid(
                    f"a second document begins in line {_line(event)}, but only one is allowed: write one document"
                )
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
            problems.append(Problem(line, "an entry must be a mapping with a name"))
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

    def _node(self, event: yaml.Event, depth: int) -> _YamlNode:
        if depth > self._limits.depth:
            # Not read to its end: the parser takes quadratic time for nested brackets.
            raise _SyntaxFault(_line(event) - 1, f"nested deeper than {self._limits.depth}")
        if isinstance(event, yaml.AliasEvent):
            return self._anchors.get(event.anchor or "") or _YamlNode(
                bad=f"refers to *{event.anchor}, which is not defined"
            )
        node = self._compose(event, depth)
        if not node.bad and node.weight > self._limits.weight:
            node = _YamlNode(bad=f"has more than {self._limits.weight} parts")
        if anchor := getattr(event, "anchor", None):
            # After its content: a reference to itself is undefined.
            self._anchors[anchor] = node
        return node

    def _compose(self, event: yaml.Event, depth: int) -> _YamlNode:
        if isinstance(event, yaml.ScalarEvent):
            return _scalar(event, typed=self._typed)
        node = self._sequence(depth) if isinstance(event, yaml.SequenceStartEvent) else self._mapping(depth)
        if not node.bad and not _is_plain(event):
            node.bad = f"has the tag {getattr(event, 'tag', None)}"
        return node

    def _sequence(self, depth: int) -> _YamlNode:
        children: list[_YamlNode] = []
        while not isinstance(event := next(self._events), yaml.SequenceEndEvent):
            children.append(self._node(event, depth + 1))
        return _YamlNode(
            [child.value for child in children if child.value is not None],
            1 + sum(child.weight for child in children),
            items=children,
            bad=next((child.bad for child in children if child.bad), ""),
        )

    def _mapping(self, depth: int) -> _YamlNode:
        pairs: dict[str, _YamlNode] = {}
        sources: list[dict[str, _YamlNode]] = []
        bad = ""
        while not isinstance(event := next(self._events), yaml.MappingEndEvent):
            is_merge = _is_merge(event)
            key = _YamlNode("<<") if is_merge else self._key(event, depth + 1)
            child = self._node(inner := next(self._events), depth + 1)
            bad = bad or key.bad or child.bad
            if is_merge:
                mappings = _mappings_of(child)
                sources += mappings or []
                bad = bad or (
                    "" if mappings is not None else f"merges a value that is not a mapping (line {_line(inner)})"
                )
            elif isinstance(key.value, str):
                if self._exact and key.value in pairs:
                    raise _SyntaxFault(_line(event) - 1, f"the key {key.value[:200]!r} is repeated")
                pairs[key.value] = child
            else:
                bad = bad or "has a key that is not text"
        if bad:
            return _YamlNode(bad=bad, pairs=pairs)
        return self._merge(pairs, sources)

    def _key(self, event: yaml.Event, depth: int) -> _YamlNode:
        """Keys are always text: `1: one` has the key "1"."""
        node = self._node(event, depth)
        return (
            replace(node, value=event.value) if isinstance(event, yaml.ScalarEvent) and node.value is not None else node
        )

    def _merge(self, pairs: dict[str, _YamlNode], sources: list[dict[str, _YamlNode]]) -> _YamlNode:
        """A mapping's own keys win, then those of the first source."""
        for source in sources:
            self._merged += len(source)
            if self._merged > self._limits.merged:
                raise Invalid(f"merging the index's entries copies more than {self._limits.merged} keys")
            for key, child in source.items():
                pairs.setdefault(key, child)
        weight = 1 + sum(child.weight for child in pairs.values())
        return _YamlNode({key: child.value for key, child in pairs.items() if child.value is not None}, weight, pairs)


def _scalar(event: yaml.ScalarEvent, *, typed: bool) -> _YamlNode:
    if not _is_plain(event):
        return _YamlNode(bad=f"has the tag {event.tag}")
    if _is_null(event):
        return _YamlNode(None)
    return _YamlNode(typed_value(event.value) if typed and event.implicit[0] and event.tag is None else event.value)


def typed_value(text: str) -> str | int | float | bool:
    """The value of a plain scalar."""
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


def _mappings_of(node: _YamlNode) -> list[dict[str, _YamlNode]] | None:
    """The mappings of a merge key: one mapping or a list of them; None if it is neither."""
    candidates = [node] if node.items is None else node.items
    mappings = [each.pairs for each in candidates if each.pairs is not None]
    return mappings if len(mappings) == len(candidates) else None


def _line(event: yaml.Event) -> int:
    return event.start_mark.line + 1 if event.start_mark is not None else 0


def _name(node: _YamlNode) -> str:
    found = node.pairs.get("name") if node.pairs else None
    return found.value if found is not None and isinstance(found.value, str) else ""
