"""Chooses the node for a replica: every node is filtered and scored, and each verdict has reasons and numbers. Pure.

The order is LocalAI's (docs/reference/wire/routing.md#placement), and it also considers single devices, available
builds, files that are already on the node, and concurrency groups without a selector. `eviction.py` decides about
ending other replicas first.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from corral.controller.scheduler.fit import DoesNotFit, Fit, find_fit
from corral.controller.scheduler.free_memory import Key, free_memory_of
from corral.controller.scheduler.groups import rivals, shared_groups
from corral.controller.scheduler.world import Build, BuildState, Model, Node, Policy, Replica, ReplicaState, World
from corral.kit.humanize import first_and_last_line, format_bytes

NOT_LOOKED_UP = Build(BuildState.UNKNOWN, "its builds were not looked up yet")


MAX_DISKS = 50  # nodes whose free space one refusal names


@dataclass(frozen=True)
class Check:
    name: str  # node, selector, backend, slots, group, disk, memory
    ok: bool
    text: str
    permanent: bool = False  # of a failed check: time alone does not change it
    pending: bool = False  # of a failed check: a lookup that decides it is running


class Score(NamedTuple):
    """Compared field by field; the smaller wins. The order of the fields is the ranking."""

    failed: bool  # its last start on the node failed: other nodes first
    grouped: int  # replicas of its concurrency groups on the node (where groups are only a preference)
    uncertain: bool  # it is not known whether it fits
    in_ram: bool  # no accelerator
    replicas: int  # of the same model on the node: the loss of one machine should not end all of them
    fetch: int  # how many of backend and files the node has to fetch first, and that takes a while
    loaded: bool  # other models run on the node (contract: an idle node first)
    in_flight: int  # active requests on the node
    used_bytes: int  # the negative of the free memory it would be placed in: the most free first
    name: str


@dataclass(frozen=True)
class Verdict:
    """Whether one node can take the replica, and why."""

    node_id: str
    node: str
    checks: tuple[Check, ...]
    fit: Fit | None = None
    score: Score | None = None  # None: the node is not eligible
    fetch_bytes: int = 0  # what the node would have to fetch, without files of unknown size
    notes: tuple[str, ...] = ()  # what influenced the score
    fits_when_empty: bool = True  # its memory would be enough without any other process

    @property
    def eligible(self) -> bool:
        return self.score is not None

    @property
    def blocked_by_replicas(self) -> bool:
        """Only other replicas block it: their memory, or a concurrency group they share with this model."""
        failed = {check.name for check in self.checks if not check.ok}
        return self.fits_when_empty and bool(failed) and failed <= {"memory", "group"}

    @property
    def waits_for_lookup(self) -> bool:
        """Only lookups that are still running block it."""
        failed = [check for check in self.checks if not check.ok]
        return bool(failed) and all(check.pending for check in failed)

    @property
    def why_not(self) -> str:
        return "; ".join(check.text for check in self.checks if not check.ok)


@dataclass(frozen=True)
class Placed:
    node_id: str
    node: str
    index: int  # of the replica on that node
    fit: Fit
    text: str
    verdicts: tuple[Verdict, ...]


@dataclass(frozen=True)
class NoCapacity:
    text: str
    verdicts: tuple[Verdict, ...]
    fits_later: bool  # some node could take it when others end or come back; False: only a change by users helps
    kept: tuple[str, ...] = ()  # a sentence for each replica that blocks it and cannot be evicted

    @property
    def why(self) -> tuple[str, ...]:
        """One line per node."""
        return tuple(f"{verdict.node}: {verdict.why_not}" for verdict in self.verdicts)


def choose_node(
    world: World, model: Model, *, without: Collection[Key] = (), only: Collection[str] | None = None
) -> Placed | NoCapacity:
    """The best node for one more replica of the model, among `only` if given, as if the replicas in `without` had
    ended."""
    verdicts = evaluate_nodes(world, model, without=without, only=only)
    best = min((verdict for verdict in verdicts if verdict.score is not None), key=_rank, default=None)
    if best is None or best.fit is None:
        return NoCapacity(_summary(world, model, verdicts), verdicts, any(_can_change(verdict) for verdict in verdicts))
    index = free_index(world, model, best.node_id)
    text = f"{best.node}: {best.fit.text}" + "".join(f"; {note}" for note in best.notes)
    return Placed(best.node_id, best.node, index, best.fit, text, verdicts)


def evaluate_nodes(
    world: World, model: Model, *, without: Collection[Key] = (), only: Collection[str] | None = None
) -> tuple[Verdict, ...]:
    """Eligible nodes first, the best of them first; then the others, by name."""
    evaluated = [
        evaluate_node(world, model, node, without) for node in world.nodes.values() if only is None or node.id in only
    ]
    return tuple(sorted(evaluated, key=lambda verdict: (not verdict.eligible, *_rank(verdict))))


def evaluate_node(world: World, model: Model, node: Node, without: Collection[Key] = ()) -> Verdict:
    build = node.builds.get(model.backend, NOT_LOOKED_UP)
    replicas = world.on_node.get(node.id, ())
    found = find_fit(model, node, build, free_memory_of(node, replicas, world.policy, without))
    fetch = fetch_bytes(model, node, build, world.policy)
    peers = rivals(world, model, node, without)
    checks = (
        check_node(node),
        check_selector(model, node),
        _check_backend(model, build),
        _check_slots(world, model, node),
        *_group_checks(world, model, peers),
        _check_disk(model, node, world.policy),
        Check("memory", isinstance(found, Fit), found.text),
    )
    failed = model.failed_on.get(node.id, "")
    notes = _notes(model, build, fetch, failed, () if world.policy.exclusive_groups else peers)
    if isinstance(found, DoesNotFit) or not all(check.ok for check in checks):
        could = isinstance(found, Fit) or found.fits_when_empty
        fit = found if isinstance(found, Fit) else None
        return Verdict(node.id, node.name, checks, fit, None, fetch, notes, could)
    others = [replica for replica in replicas if replica.model != model.name and replica.key not in without]
    score = Score(
        failed=bool(failed),
        grouped=len(peers),
        uncertain=not found.certain,
        in_ram=not found.devices,
        replicas=len(_current_replicas(world, model, node.id)),
        fetch=_slow_fetches(model, node, build, world.policy),
        loaded=bool(others),
        in_flight=sum(replica.in_flight for replica in replicas),
        used_bytes=-found.free_bytes,
        name=node.name,
    )
    return Verdict(node.id, node.name, checks, found, score, fetch, notes)


def check_node(node: Node) -> Check:
    """Whether the node takes new replicas at all."""
    if node.vetoes:
        return Check("node", False, "; ".join(node.vetoes))
    if node.status != "healthy":
        return Check("node", False, f"is {node.status}")
    if node.bus_down:
        return Check("node", False, "cannot receive orders: its connection to the bus is down")
    return Check("node", True, "healthy")


def check_selector(model: Model, node: Node) -> Check:
    selector = model.schedule.selector
    if not selector.terms:
        return Check("selector", True, "no selector: any node is allowed")
    missing = selector.why_not(node.labels)
    return Check("selector", not missing, "; ".join(missing) or f"has {selector}", permanent=True)


def free_index(world: World, model: Model, node_id: str) -> int:
    """The lowest index that no process of the model has on the node, of any revision and also while it stops."""
    taken = {replica.index for replica in world.on_node.get(node_id, ()) if replica.model == model.name}
    return next(index for index in range(len(taken) + 1) if index not in taken)


def free_slots(world: World, model: Model, node: Node) -> int:
    """How many more replicas of the model the node can take."""
    return max(0, max(1, node.max_replicas_per_model) - len(_current_replicas(world, model, node.id)))


def missing_files_bytes(model: Model, node: Node, policy: Policy) -> int | None:
    """The size of the model's files that the node lacks; None: the sizes are not known."""
    if policy.shared_models:
        return 0
    if model.files is None:
        return None
    missing = [file for file in model.files if file.digest not in node.files]
    return None if any(file.size_bytes <= 0 for file in missing) else sum(file.size_bytes for file in missing)


def fetch_bytes(model: Model, node: Node, build: Build, policy: Policy) -> int:
    return (missing_files_bytes(model, node, policy) or 0) + (
        build.size_bytes if build.state is BuildState.INSTALLABLE else 0
    )


def _slow_fetches(model: Model, node: Node, build: Build, policy: Policy) -> int:
    files = missing_files_bytes(model, node, policy)
    return (build.state is not BuildState.INSTALLED) + (files is None or files >= policy.fetch_matters_bytes)


def _check_backend(model: Model, build: Build) -> Check:
    reason = f": {build.reason}" if build.reason else ""
    match build.state:
        case BuildState.INSTALLED:
            return Check("backend", True, f"{model.backend} is installed")
        case BuildState.INSTALLABLE:
            return Check("backend", True, f"{model.backend} can be installed")
        case BuildState.MISSING:
            return Check("backend", False, f"no build of {model.backend}{reason}", permanent=True)
        case BuildState.FORBIDDEN:
            return Check("backend", False, f"{model.backend} is not allowed here{reason}", permanent=True)
        case BuildState.UNKNOWN:
            return Check("backend", False, f"{model.backend}{reason or ': its builds are not known'}")
        case BuildState.LOOKING_UP:
            return Check("backend", False, f"looking up a build of {model.backend} for this node", pending=True)


def _check_slots(world: World, model: Model, node: Node) -> Check:
    most, there = max(1, node.max_replicas_per_model), len(_current_replicas(world, model, node.id))
    return Check("slots", there < most, f"runs {there} of at most {most} replicas of this model")


def _group_checks(world: World, model: Model, rivals_there: Sequence[Replica]) -> tuple[Check, ...]:
    """Only for a model that has groups, and only where groups are exclusive."""
    if not (model.concurrency_groups and world.policy.exclusive_groups):
        return ()
    if not rivals_there:
        return (Check("group", True, "runs no other model of its concurrency groups"),)
    rival = min(rivals_there, key=lambda replica: replica.model)
    group = shared_groups(world, model, rival)[0]
    return (Check("group", False, f"runs {rival.model} of the same concurrency group {group!r}"),)


def _check_disk(model: Model, node: Node, policy: Policy) -> Check:
    """Space for missing files and some headroom (docs/reference/wire/budgets-and-labels.md#disk-headroom). A node that
    reports no disk passes."""
    missing = missing_files_bytes(model, node, policy)
    if missing == 0:
        return Check("disk", True, "has all files")
    if not node.total_disk:
        return Check("disk", True, "size not reported")
    if missing is None:
        need = policy.disk_unknown_bytes
    else:
        need = missing + max(int(missing * policy.disk_share), policy.disk_spare_bytes)
    text = f"{format_bytes(need)} needed on disk, {format_bytes(node.available_disk)} free"
    enough = node.available_disk >= need
    if not enough and not policy.disk_check:
        return Check("disk", True, f"{text}; ignored, because the disk check is switched off")
    return Check("disk", enough, text, permanent=True)


def _current_replicas(world: World, model: Model, node_id: str) -> list[Replica]:
    """The replicas that count against the node's limit: of the present revision, so that a new one can start beside the
    old one."""
    return [
        replica
        for replica in world.on_node.get(node_id, ())
        if replica.model == model.name
        and replica.revision == model.revision
        and replica.state is not ReplicaState.STOPPING
    ]


def _notes(model: Model, build: Build, fetch: int, failed: str, peers: Sequence[Replica]) -> tuple[str, ...]:
    notes = []
    if failed:
        notes.append(f"its last start here failed: {first_and_last_line(failed)}")
    if peers:
        notes.append(f"avoids nodes that run {', '.join(sorted({peer.model for peer in peers}))}")
    if fetch:
        notes.append(f"{format_bytes(fetch)} to fetch")
    elif build.state is BuildState.INSTALLED and model.files:
        notes.append("backend and files are on the node")
    return tuple(notes)


def _rank(verdict: Verdict) -> tuple[Score | None, str, str]:
    """Names are usually unique; the id decides where two nodes share one."""
    return (verdict.score, verdict.node, verdict.node_id)


def _can_change(verdict: Verdict) -> bool:
    """Whether the node could take the model later without any change by users."""
    return verdict.fits_when_empty and not any(check.permanent for check in verdict.checks if not check.ok)


def _summary(world: World, model: Model, verdicts: Sequence[Verdict]) -> str:
    if pending := [verdict.node for verdict in verdicts if verdict.waits_for_lookup]:
        return f"looking up a build of {model.backend} for {_first_names(pending)} …"
    need = model.memory
    what = f"{model.name} (needs {format_bytes(need.total_bytes)}: {need.how})" if need.known else model.name
    if not verdicts:
        return f"no node can run {what}: there are no nodes"
    if len(verdicts) == 1:
        return f"no node can run {what}: {verdicts[0].node}: {verdicts[0].why_not}"
    causes: dict[str, list[str]] = {}
    for verdict in verdicts:
        first = next(check.name for check in verdict.checks if not check.ok)
        causes.setdefault(first, []).append(verdict.node)
    summary = ", ".join(f"{len(names)} for {cause} ({_first_names(names)})" for cause, names in causes.items())
    return f"none of {len(verdicts)} nodes can run {what}: {summary}{_disks(world, verdicts)}"


def _disks(world: World, verdicts: Sequence[Verdict]) -> str:
    """The free space of all nodes, most first, if the disk of one is too small: users choose where to make room."""
    checks = [check for verdict in verdicts for check in verdict.checks if check.name == "disk" and not check.ok]
    if not checks:
        return ""
    reporting = [node for verdict in verdicts if (node := world.nodes[verdict.node_id]).total_disk]
    reporting.sort(key=lambda node: (-node.available_disk, node.name))
    each = [f"{node.name} {format_bytes(node.available_disk)}" for node in reporting]
    return f"; {checks[0].text.partition(',')[0]}; free: {_first_names(each, MAX_DISKS)}"


def _first_names(names: Sequence[str], most: int = 3) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
