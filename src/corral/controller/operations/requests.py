"""Checks requests for operations on backends, and resolves them into nodes and builds before anything is stored: to
accept a request (`accept.py`) or to preview it (`preview.py`, which decides what happens on each node).

`parse_request` is pure; `RequestResolver` reads the store and the galleries.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

import msgspec

from corral.controller.backends.catalogue import Catalogue, MachineKind
from corral.controller.backends.plan import NoBuild
from corral.controller.backends.rules import Unwanted, Wanted, fold
from corral.controller.backends.targets import TargetResolver
from corral.controller.backends.world import kind_of, kinds_of
from corral.controller.inventory.installed import (
    Installed,
    concrete_name,
    find_installed,
    names_in,
    only_called,
    previous_digests,
)
from corral.controller.inventory.nodes import is_current, takes_backends
from corral.controller.inventory.routing import read_routing
from corral.controller.models.views import definition_of
from corral.controller.rollouts.options import DEFAULT_MAX_PARALLEL, parse_max_parallel
from corral.kit.errors import Conflict, Invalid, NotFound
from corral.kit.humanize import did_you_mean
from corral.kit.redact import is_redacted
from corral.store.engine.transactions import Store, Transaction
from corral.store.records import (
    NO_SOAK,
    BackendRequest,
    BackendRule,
    RolloutSettings,
    RuleOrigin,
    Scope,
    ScopeKind,
    TargetBuild,
    Want,
)
from corral.store.tables import (
    backend_rules,
    backend_targets,
    models,
    node_backends,
    node_labels,
    nodes,
    replicas,
)
from corral.store.tables.node_backends import Inventory
from corral.store.tables.nodes import NodeOutline

_NAME_MAX = 255
_URI_MAX = 4096
_OWN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,199}\Z")  # it becomes the name of a folder


class OperationKind(StrEnum):
    INSTALL = "install"
    UPGRADE = "upgrade"
    DELETE = "delete"
    ROLLBACK = "rollback"


class ConcreteNeedsTarget(Conflict):
    """A build for one kind of machine was requested for all nodes."""

    code = "concrete_backend_requires_target"

    def __init__(self, message: str, meta_alternative: str) -> None:
        super().__init__(message)
        self.meta_alternative = meta_alternative


@dataclass(frozen=True)
class OperationRequest:
    kind: OperationKind
    backend_request: BackendRequest
    scope: Scope
    force: bool = False
    max_parallel: str = ""
    by: str = ""  # the API key; empty = Corral itself
    origin: RuleOrigin = RuleOrigin.PERSON
    rollout: RolloutSettings = NO_SOAK


def parse_request(
    kind: OperationKind,
    backend_request: BackendRequest,
    *,
    scope: Scope,
    force: bool = False,
    max_parallel: str = "",
    by: str = "",
    origin: RuleOrigin = RuleOrigin.PERSON,
    rollout: RolloutSettings = NO_SOAK,
) -> OperationRequest:
    """Raises Invalid for a request that makes no sense."""
    if not backend_request.backend and not backend_request.uri:
        raise Invalid("name a backend, or give a uri")
    for text, most in (
        (backend_request.backend, _NAME_MAX),
        (backend_request.alias, _NAME_MAX),
        (backend_request.uri, _URI_MAX),
    ):
        if len(text) > most:
            raise Invalid(f"{text[:40]!r}… is longer than {most} characters")
        if any(ord(letter) < 0x20 or ord(letter) == 0x7F for letter in text):
            raise Invalid("names must not hold control characters")
    if is_redacted(backend_request.uri):
        raise Invalid(f"{backend_request.uri!r} hides a login or a secret: write them in place of the stars")
    if backend_request.uri and backend_request.backend and not _OWN_NAME.match(backend_request.backend):
        raise Invalid(
            f"{backend_request.backend!r} cannot be a backend's name: use letters, digits, and . _ + - inside"
        )
    if backend_request.alias and not _OWN_NAME.match(backend_request.alias):
        raise Invalid(f"{backend_request.alias!r} cannot be an alias: use letters, digits, and . _ + - inside")
    if force and kind not in (OperationKind.INSTALL, OperationKind.DELETE):
        raise Invalid("only an install or a delete can be forced")
    if rollout.has_soak and kind is not OperationKind.UPGRADE:
        raise Invalid("only an upgrade has a soak")
    if max_parallel:
        max_parallel = parse_max_parallel(max_parallel)
    elif kind is OperationKind.UPGRADE:
        max_parallel = DEFAULT_MAX_PARALLEL
    return OperationRequest(
        kind=kind,
        backend_request=backend_request,
        scope=scope,
        force=force,
        max_parallel=max_parallel,
        by=by,
        origin=origin,
        rollout=rollout,
    )


_SHOWN = 5  # names in a sentence

Builds = Mapping[MachineKind, TargetBuild | NoBuild]


@dataclass(frozen=True)
class Candidate:
    """A node that the request covers, with its inventory."""

    outline: NodeOutline
    inventory: Inventory | None
    want: Wanted | Unwanted | None  # the desired state by the rules so far

    @property
    def kind(self) -> MachineKind:
        return kind_of(self.outline)

    @property
    def known(self) -> bool:
        return is_current(self.inventory, self.outline)

    def find(self, backend: str, variant: str = "") -> Installed | None:
        return find_installed(self.inventory.backends, backend, variant) if self.inventory is not None else None


@dataclass(frozen=True)
class Elsewhere:
    """What other nodes than one that switches could do meanwhile."""

    serving: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # by model, names of nodes that answer for it
    healthy: tuple[NodeOutline, ...] = ()  # nodes that take replicas, in name order
    installed: Mapping[str, frozenset[str]] = field(default_factory=dict)  # by node, its backends under all their names


@dataclass(frozen=True)
class ResolvedRequest:
    request: OperationRequest  # in its normal form
    want: Want
    candidates: tuple[Candidate, ...]
    builds: Builds = field(default_factory=dict)
    target: str = ""  # id of an earlier target to use; empty = a new one from `builds`
    notes: tuple[str, ...] = ()
    elsewhere: Elsewhere = field(default_factory=lambda: Elsewhere())

    @property
    def backend(self) -> str:
        return self.request.backend_request.backend


class RequestResolver:
    def __init__(self, store: Store, catalogue: Catalogue, targets: TargetResolver, *, budget_s: float = 5.0) -> None:
        """`budget_s`: how long a request may wait for galleries and registries; the rest is resolved later."""
        self._store = store
        self._catalogue = catalogue
        self._targets = targets
        self._budget_s = budget_s

    async def resolve(self, request: OperationRequest) -> ResolvedRequest:
        """Raises NotFound, Invalid or Conflict for a request that cannot be served."""
        match request.kind:
            case OperationKind.INSTALL:
                return await self._install(request)
            case OperationKind.UPGRADE:
                return await self._upgrade(request)
            case OperationKind.DELETE:
                return await self._delete(request)
            case OperationKind.ROLLBACK:
                return await self._rollback(request)

    async def _install(self, request: OperationRequest) -> ResolvedRequest:
        listed = await self._catalogue.look_up(request.backend_request)
        if listed.hardware_specific and request.scope.kind is not ScopeKind.NODE:
            hint = f"; install {listed.meta_alternative} instead" if listed.meta_alternative else ""
            raise ConcreteNeedsTarget(
                f"{listed.name} is a build for one kind of machine: choose a node for it{hint}", listed.meta_alternative
            )
        backend_request = listed.request or msgspec.structs.replace(request.backend_request, backend=listed.name)
        request = replace(request, backend_request=backend_request)
        async with self._store.read() as tx:
            candidates = await read_candidates(tx, request)
            elsewhere = await _read_elsewhere(tx)
        builds = await self._targets.resolve(backend_request, _kinds(candidates), budget_s=self._budget_s)
        if backend_request.uri:  # no other source can provide a build
            _refuse_hopeless(builds, candidates)
        return ResolvedRequest(request, Want.PRESENT, candidates, builds, elsewhere=elsewhere)

    async def _upgrade(self, request: OperationRequest) -> ResolvedRequest:
        async with self._store.read() as tx:
            request = await _as_rules_call_it(tx, request)
            candidates = await read_candidates(tx, request)
            rules = await backend_rules.list_live(tx, request.backend_request.backend)
            elsewhere = await _read_elsewhere(tx)
        concerned = _concerned(candidates, request.backend_request.backend)
        if not any(candidate.find(request.backend_request.backend) for candidate in candidates):
            raise NotFound(_not_installed(request, candidates))
        request = replace(request, backend_request=_earlier_request(rules) or request.backend_request)
        self._catalogue.forget_sources()  # the new version may have been published a moment ago
        builds = await self._targets.resolve(request.backend_request, _kinds(concerned), budget_s=self._budget_s)
        _refuse_hopeless(builds, concerned)
        return ResolvedRequest(request, Want.UPGRADED, concerned, builds, elsewhere=elsewhere)

    async def _delete(self, request: OperationRequest) -> ResolvedRequest:
        async with self._store.read() as tx:
            request = await _as_rules_call_it(tx, request)
            candidates = await read_candidates(tx, request)
        backend = request.backend_request.backend
        inventories = [candidate.inventory.backends for candidate in candidates if candidate.inventory is not None]
        shared = [found for rows in inventories if len(found := only_called(rows, backend)) > 1]
        if several := frozenset[str]().union(*shared):
            # A node would remove one of them, and the others would still have that name.
            raise Conflict(f"{backend} is an alias of {', '.join(sorted(several))}: name one of them")
        there = [candidate.find(backend) for candidate in candidates if candidate.find(backend)]
        wanted = any(isinstance(candidate.want, Wanted) for candidate in candidates)
        if candidates and not there and not wanted and all(candidate.known for candidate in candidates):
            raise NotFound(_not_installed(request, candidates))
        if there and all(found is not None and found.system for found in there) and not wanted:
            raise Invalid(f"{backend} belongs to the system where it is installed and cannot be removed")
        async with self._store.read() as tx:
            users = () if request.force else await _users_of(tx, request, candidates)
        if users:
            shown = ", ".join(users[:_SHOWN]) + (f" and {len(users) - _SHOWN} more" if len(users) > _SHOWN else "")
            raise Conflict(f"{backend} is used by {shown}: delete the models or give them another backend, or force it")
        return ResolvedRequest(request, Want.ABSENT, candidates)

    async def _rollback(self, request: OperationRequest) -> ResolvedRequest:
        async with self._store.read() as tx:
            request = await _as_rules_call_it(tx, request)
            candidates = await read_candidates(tx, request)
            rules = await backend_rules.list_live(tx, request.backend_request.backend)
            earlier = await _earlier_target(tx, rules)
            elsewhere = await _read_elsewhere(tx)
        concerned = _concerned(candidates, request.backend_request.backend)
        if not any(candidate.find(request.backend_request.backend) for candidate in candidates):
            raise NotFound(_not_installed(request, candidates))
        if earlier is not None:
            rule, builds = earlier
            request = replace(request, backend_request=rule.request)
            return ResolvedRequest(request, Want.UPGRADED, concerned, builds, rule.target, elsewhere=elsewhere)
        builds = kept_versions(concerned, request.backend_request.backend)
        if not builds:
            name = request.backend_request.backend
            raise Conflict(
                f"no earlier version of {name} is known, and no node keeps one: `corral backends list` shows what is "
                f"installed, `corral backends upgrade {name}` installs a newer version"
            )
        backend_request = msgspec.structs.replace(_earlier_request(rules) or request.backend_request, pinned=True)
        request = replace(request, backend_request=backend_request)
        return ResolvedRequest(request, Want.UPGRADED, concerned, builds, elsewhere=elsewhere)


async def read_candidates(tx: Transaction, request: OperationRequest) -> tuple[Candidate, ...]:
    """The nodes that the request covers, in name order."""
    outlines = [outline for outline in await nodes.list_outlines(tx) if takes_backends(outline)]
    labels = await node_labels.list_for(tx)
    covered = [row for row in outlines if request.scope.matches(row.id, labels.get(row.id, {}))]
    inventories = {row.node_id: row for row in await node_backends.list_(tx, [row.id for row in covered])}
    rules = await backend_rules.list_live(tx, request.backend_request.backend)
    return tuple(
        _candidate(
            outline, inventories.get(outline.id), rules, labels.get(outline.id, {}), request.backend_request.backend
        )
        for outline in covered
    )


async def _read_elsewhere(tx: Transaction) -> Elsewhere:
    replicas, _ = await read_routing(tx)
    outlines = await nodes.list_outlines(tx)
    names = {outline.id: outline.name for outline in outlines}
    found: dict[str, set[str]] = {}
    for replica in replicas:
        if not replica.last_resort:
            found.setdefault(replica.model, set()).add(names[replica.node_id])
    healthy = [each for each in outlines if takes_backends(each) and each.status == "healthy" and not each.bus_down]
    installed = {row.node_id: names_in(row.backends) for row in await node_backends.list_(tx)}
    return Elsewhere({model: tuple(sorted(on)) for model, on in found.items()}, tuple(healthy), installed)


def kept_versions(candidates: Sequence[Candidate], backend: str) -> dict[MachineKind, TargetBuild | NoBuild]:
    """Per kind of machine, the version that most nodes keep beside the current one. Pure."""
    kept: dict[MachineKind, Counter[tuple[str, str]]] = {}
    for candidate in candidates:
        rows = candidate.inventory.backends if candidate.inventory is not None else ()
        for digest in previous_digests(rows, backend)[:1]:
            kept.setdefault(candidate.kind, Counter())[concrete_name(rows, backend), digest] += 1
    builds: dict[MachineKind, TargetBuild | NoBuild] = {}
    for kind, votes in kept.items():
        variant, digest = min(votes, key=lambda vote: (-votes[vote], vote))
        builds[kind] = TargetBuild(variant, digest)
    return builds


def _candidate(
    outline: NodeOutline, inventory: Inventory | None, rules: list[BackendRule], labels: Mapping[str, str], backend: str
) -> Candidate:
    installed = names_in(inventory.backends) if inventory is not None else frozenset[str]()
    folded = fold(rules, node_id=outline.id, labels=labels, installed=installed)
    return Candidate(outline, inventory, folded.get(backend))


async def _as_rules_call_it(tx: Transaction, request: OperationRequest) -> OperationRequest:
    """The request by the name that rules use: if a rule names the meta backend or the alias of a build, the request for
    the build is about the same backend, and two rules for it under two names would conflict. The prefix of a gallery
    says nothing about the installed backend and is dropped."""
    name = request.backend_request.backend.rpartition("@")[2]
    ruled = {rule.backend for rule in await backend_rules.list_live(tx)}
    if name not in ruled:
        rows = [row for inventories in await node_backends.list_(tx) for row in inventories.backends]
        metas = {row.name for row in rows if row.is_meta and row.meta_backend_for == name}
        aliases = {row.alias for row in rows if row.name == name and not row.is_meta}
        shared = sorted((metas | aliases) & ruled)
        name = shared[0] if shared else name
    return replace(request, backend_request=msgspec.structs.replace(request.backend_request, backend=name))


async def _users_of(tx: Transaction, request: OperationRequest, candidates: Sequence[Candidate]) -> Sequence[str]:
    """The models that could no longer be served: if the backend is deleted on all nodes, every model that names it;
    otherwise the models with a replica on one of the nodes."""
    backend = request.backend_request.backend
    if request.scope.kind is ScopeKind.ALL:
        named = ((row.id, definition_of(row)) for row in await models.list_(tx))
        return sorted(name for name, found in named if found is not None and found.backend == backend)
    nodes_by_id = {candidate.outline.id: candidate.outline.name for candidate in candidates}
    wanted = await replicas.list_(tx, node_ids=list(nodes_by_id))
    there = {
        (row.model, nodes_by_id[row.node_id]) for row in wanted if row.backend == backend and row.leaving_at is None
    }
    return [f"{model} on {node}" for model, node in sorted(there)]


def _concerned(candidates: Sequence[Candidate], backend: str) -> tuple[Candidate, ...]:
    """The nodes that an upgrade is about: those where the backend is installed or wanted."""
    return tuple(row for row in candidates if row.find(backend) or isinstance(row.want, Wanted))


def _kinds(candidates: Sequence[Candidate]) -> set[MachineKind]:
    return kinds_of(candidate.outline for candidate in candidates)


def _earlier_request(rules: Sequence[BackendRule]) -> BackendRequest | None:
    """The earlier request, if it named a uri or a gallery: an upgrade uses the same source."""
    backend_request = next((rule.request for rule in reversed(rules) if rule.want != Want.ABSENT), None)
    special = backend_request is not None and (
        backend_request.uri or backend_request.gallery or backend_request.galleries
    )
    return msgspec.structs.replace(backend_request, pinned=False) if backend_request is not None and special else None


async def _earlier_target(tx: Transaction, rules: Sequence[BackendRule]) -> tuple[BackendRule, Builds] | None:
    """The last rule whose builds differ from the current ones."""
    chain = [rule for rule in rules if rule.want != Want.ABSENT and rule.target]
    builds: dict[str, dict[MachineKind, TargetBuild | NoBuild]] = {}
    for row in await backend_targets.list_for(tx, sorted({rule.target for rule in chain})):
        found = row.build if row.build is not None else NoBuild(row.reason)
        builds.setdefault(row.id, {})[MachineKind(row.capability, row.platform, row.python)] = found
    if not chain:
        return None
    now = _digests(builds.get(chain[-1].target, {}))
    for rule in reversed(chain[:-1]):
        before = _digests(builds.get(rule.target, {}))
        if before and any(now.get(kind) != digest for kind, digest in before.items()):
            return rule, builds[rule.target]
    return None


def _digests(builds: Builds) -> dict[MachineKind, str]:
    return {kind: build.digest for kind, build in builds.items() if isinstance(build, TargetBuild)}


def _refuse_hopeless(builds: Builds, candidates: Sequence[Candidate]) -> None:
    """Raises Invalid if no node could ever get a build."""
    if builds and len(builds) == len(_kinds(candidates)):
        reasons = [build.reason for build in builds.values() if isinstance(build, NoBuild)]
        if len(reasons) == len(builds):
            raise Invalid("; ".join(sorted(set(reasons))))


def _not_installed(request: OperationRequest, candidates: Sequence[Candidate]) -> str:
    backend = request.backend_request.backend
    names = {name for row in candidates if row.inventory is not None for name in names_in(row.inventory.backends)}
    where = {ScopeKind.ALL: "on any node", ScopeKind.SELECTOR: "on any of these nodes", ScopeKind.NODE: "on this node"}
    return f"backend {backend!r} is not installed {where[request.scope.kind]}{did_you_mean(backend, names)}"
