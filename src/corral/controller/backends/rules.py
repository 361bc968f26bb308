"""Folds the rules that users make for all nodes, some or one into the desired backends of one node. Pure
(docs/explanation/design.md#rules).

A rule never changes: a later rule overrides it, or a user withdraws it. The desired state of a node is the fold of the
rules that match it, in the order of their generations; so a node that joins later reaches the same state.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from corral.contract.messages.backends import NodeBackend
from corral.controller.inventory.installed import find_installed, only_called
from corral.store.records import BackendRule, RuleOrigin, ScopeKind, Want


@dataclass(frozen=True)
class Wanted:
    """The backend should be installed, with the build of the target. `generation` is that of the deciding rule."""

    target: str
    generation: int
    operation: str
    force: bool = False
    upgraded: bool = False  # the installed build must have been installed for this rule, or be the same build
    max_parallel: str = ""


@dataclass(frozen=True)
class Unwanted:
    generation: int
    operation: str


def fold(
    rules: Iterable[BackendRule], *, node_id: str, labels: Mapping[str, str], installed: frozenset[str] = frozenset()
) -> dict[str, Wanted | Unwanted]:
    """The desired state of each backend that a rule names; all other backends are unmanaged.

    `installed`: the names that the node reports. An upgrade changes only wanted or installed backends; it never
    installs one."""
    result: dict[str, Wanted | Unwanted] = {}
    for rule in sorted(rules, key=lambda rule: rule.generation):
        if not rule.covers(node_id, labels):
            continue
        before = result.get(rule.backend)
        match rule.want:
            case Want.PRESENT:
                if isinstance(before, Unwanted) and rule.origin is RuleOrigin.LOAD:
                    continue  # a load does not override what a user decided
                result[rule.backend] = _wanted(rule)
            case Want.ABSENT:
                result[rule.backend] = Unwanted(rule.generation, rule.operation_id)
            case Want.UPGRADED:
                there = isinstance(before, Wanted) or (before is None and rule.backend in installed)
                if there:
                    result[rule.backend] = _wanted(rule)
    return result


def without_overruled(rules: Iterable[BackendRule]) -> list[BackendRule]:
    """The rules that can still decide something: a rule for all nodes overrides all earlier ones of the same backend.
    The overridden rules stay stored, because they hold again when the later rule is withdrawn."""
    kept: list[BackendRule] = []
    ended: set[str] = set()
    for rule in sorted(rules, key=lambda rule: rule.generation, reverse=True):
        if rule.backend in ended:
            continue
        kept.append(rule)
        # An earlier rule may override one of a load, and an upgrade needs the earlier rules: these end nothing.
        whole = rule.scope_kind is ScopeKind.ALL and not rule.excluded and rule.origin is RuleOrigin.PERSON
        if whole and rule.want in (Want.PRESENT, Want.ABSENT):
            ended.add(rule.backend)
    return kept[::-1]


def _wanted(rule: BackendRule) -> Wanted:
    return Wanted(
        target=rule.target,
        generation=rule.generation,
        operation=rule.operation_id,
        force=rule.force,
        upgraded=rule.want is Want.UPGRADED,
        max_parallel=rule.max_parallel,
    )


def has_to_go(rows: Sequence[NodeBackend], name: str, wanted: Mapping[str, Wanted | Unwanted]) -> bool:
    """Whether a backend with this unwanted name is installed. A build that has the name only as an alias, and is wanted
    by its own name, does not count: the next pass would install it again."""
    called_so = only_called(rows, name)
    if called_so and all(isinstance(wanted.get(build), Wanted) for build in called_so):
        return False
    return find_installed(rows, name) is not None
