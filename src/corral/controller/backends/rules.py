"""Rules: what people want, for all nodes, some, or one. Pure (docs/explanation/design.md#rules).

A rule never changes; a later one says otherwise, or it is withdrawn. What holds on a node is found by folding the rules
that match it in the order they were made. So a node that was off for a month, or joins tomorrow, comes to the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from corral.contract.messages.backends import NodeBackend
from corral.controller.inventory.installed import find_installed, only_called
from corral.store.records import BackendRule, Origin, ScopeKind, Want


@dataclass(frozen=True)
class Wanted:
    """The backend should be there, as the target says. `generation` is the rule that decided."""

    target: str
    generation: int
    operation: str
    force: bool = False
    upgraded: bool = False  # what is there must have been fetched for this rule, or be the very build
    max_parallel: str = ""


@dataclass(frozen=True)
class Unwanted:
    generation: int
    operation: str


def fold(
    rules: Iterable[BackendRule], *, node_id: str, labels: Mapping[str, str], installed: frozenset[str] = frozenset()
) -> dict[str, Wanted | Unwanted]:
    """What holds for each backend some rule names; the rest is unmanaged and none of our business.

    `installed`: what the node reports. An upgrade changes only what is wanted or installed: it never installs."""
    result: dict[str, Wanted | Unwanted] = {}
    for rule in sorted(rules, key=lambda rule: rule.generation):
        if not rule.covers(node_id, labels):
            continue
        before = result.get(rule.backend)
        match rule.want:
            case Want.PRESENT:
                if isinstance(before, Unwanted) and rule.origin is Origin.LOAD:
                    continue  # where a person said no, a load does not say yes
                result[rule.backend] = _wanted(rule)
            case Want.ABSENT:
                result[rule.backend] = Unwanted(rule.generation, rule.operation_id)
            case Want.UPGRADED:
                there = isinstance(before, Wanted) or (before is None and rule.backend in installed)
                if there:
                    result[rule.backend] = _wanted(rule)
    return result


def without_overruled(rules: Iterable[BackendRule]) -> list[BackendRule]:
    """Rules without those that cannot decide anything any more: a word for every node ends all earlier ones about the
    same backend. They are needed again when that word is withdrawn, so they are only left out here, not forgotten."""
    kept: list[BackendRule] = []
    ended: set[str] = set()
    for rule in sorted(rules, key=lambda rule: rule.generation, reverse=True):
        if rule.backend in ended:
            continue
        kept.append(rule)
        # A load may be overruled by an earlier no, so it ends nothing; an upgrade only changes what went before.
        whole = rule.scope_kind is ScopeKind.ALL and not rule.excluded and rule.origin is Origin.PERSON
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
    """Whether something is there by a name that is not wanted. A build that only goes by it too, and is wanted by its
    own, does not count: removed, it would be brought back."""
    called_so = only_called(rows, name)
    if called_so and all(isinstance(wanted.get(build), Wanted) for build in called_so):
        return False
    return find_installed(rows, name) is not None
