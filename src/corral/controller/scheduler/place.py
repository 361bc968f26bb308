"""Which node gets a replica: every node is filtered and scored, and says why, with the numbers used. Pure.

The order is LocalAI's (docs/reference/wire/routing.md#placement) with what it lacks: devices one by one, builds that
exist, files that are there, groups that keep apart also without a selector. Making room by ending others is
`evict.py`'s.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from corral.controller.scheduler.fit import Fit, TooLittle, find_fit
from corral.controller.scheduler.groups import rivals, shared_groups
from corral.controller.scheduler.room import Key, room_of
from corral.controller.scheduler.world import Build, BuildState, Model, Node, Policy, Replica, ReplicaState, World
from corral.kit.humanize import first_and_last_line, format_bytes

NOT_LOOKED_UP = Build(BuildState.UNKNOWN, "nobody has looked yet whether there is a build for it")


@dataclass(frozen=True)
class Check:
    name: str  # node, selector, backend, slots, group, disk, memory
    ok: bool
    text: str
    lasting: bool = False  # of a failed one: time alone does not cure it
    looking: bool = False  # of a failed one: it is being found out


class Score(NamedTuple):
    """Compared field by field; the smaller wins. The order is the ranking."""

    failed: bool  # its last start there failed: anywhere else first
    grouped: int  # replicas there of models of its concurrency groups (where these are only a preference)
    uncertain: bool  # nobody knows whether it fits
    in_ram: bool  # no accelerator
    replicas: int  # of the same model there: one machine's end should not be that of all
    fetch: int  # of backend and files, what has to be brought first, and takes a while
    loaded: bool  # other models are there (contract: an idle node first)
    in_flight: int  # requests under way on the node
    used_bytes: int  # the negative of what is free where it would go: the roomiest first
    name: str


@dataclass(frozen=True)
class Verdict:
    """What was found about one node."""

    node_id: str
    node: str
    checks: tuple[Check, ...]
    fit: Fit | None = None
    score: Score | None = None  # None: it is not eligible
    fetch_bytes: int = 0  # what the node would have to fetch; files of unknown size are not in it
    notes: tuple[str, ...] = ()  # what counted for or against it without ruling it out
    could_hold: bool = True  # with nothing else on it, its memory would be enough

    @property
    def eligible(self) -> bool:
        return self.score is not None

    @property
    def only_replicas(self) -> bool:
        """Only other replicas are in the way: their memory, or a concurrency group they share with this model."""
        failed = {check.name for check in self.checks if not check.ok}
        return self.could_hold and bool(failed) and failed <= {"memory", "group"}

    @property
    def only_looking(self) -> bool:
        """Nothing is in the way as far as is known, and the rest is being found out."""
        failed = [check for check in self.checks if not check.ok]
        return bool(failed) and all(check.looking for check in failed)

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
class NoRoom:
    text: str
    verdicts: tuple[Verdict, ...]
    ever: bool  # some node could take it if others ended, or came back; False: only a change by people helps
    kept: tuple[str, ...] = ()  # who is in the way and may not go: a sentence each

    @property
    def why(self) -> tuple[str, ...]:
        """One line per node: people will ask."""
        return tuple(f"{verdict.node}: {verdict.why_not}" for verdict in self.verdicts)


def place(
    world: World, model: Model, *, gone: Collection[Key] = (), only: Collection[str] | None = None
) -> Placed | NoRoom:
    """The best node for one more replica of it, of those in `only` if given; as if the replicas in `gone` had ended."""
    verdicts = judge_all(world, model, gone=gone, only=only)
    best = min((verdict for verdict in verdicts if verdict.score is not None), key=_rank, default=None)
    if best is None or best.fit is None:
        return NoRoom(_summary(model, verdicts), verdicts, any(_may_change(verdict) for verdict in verdicts))
    index = free_index(world, model, best.node_id)
    text = f"{best.node}: {best.fit.text}" + "".join(f"; {note}" for note in best.notes)
    return Placed(best.node_id, best.node, index, best.fit, text, verdicts)


def judge_all(
    world: World, model: Model, *, gone: Collection[Key] = (), only: Collection[str] | None = None
) -> tuple[Verdict, ...]:
    """Best first, then those that are out, by name."""
    judged = [judge(world, model, node, gone) for node in world.nodes.values() if only is None or node.id in only]
    return tuple(sorted(judged, key=lambda verdict: (not verdict.eligible, *_rank(verdict))))


def judge(world: World, model: Model, node: Node, gone: Collection[Key] = ()) -> Verdict:
    build = node.builds.get(model.backend, NOT_LOOKED_UP)
    replicas = world.on_node.get(node.id, ())
    found = find_fit(model, node, build, room_of(node, replicas, world.policy, gone))
    fetch = fetch_bytes(model, node, build, world.policy)
    peers = rivals(world, model, node, gone)
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
    if isinstance(found, TooLittle) or not all(check.ok for check in checks):
        could = isinstance(found, Fit) or found.ever
        fit = found if isinstance(found, Fit) else None
        return Verdict(node.id, node.name, checks, fit, None, fetch, notes, could)
    others = [replica for replica in replicas if replica.model != model.name and replica.key not in gone]
    score = Score(
        failed=bool(failed),
        grouped=len(peers),
        uncertain=not found.certain,
        in_ram=not found.devices,
        replicas=len(_counted(world, model, node.id)),
        fetch=_slow_to_fetch(model, node, build, world.policy),
        loaded=bool(others),
        in_flight=sum(replica.in_flight for replica in replicas),
        used_bytes=-found.free_bytes,
        name=node.name,
    )
    return Verdict(node.id, node.name, checks, found, score, fetch, notes)


def check_node(node: Node) -> Check:
    """Whether it gets new work at all."""
    if node.vetoes:
        return Check("node", False, "; ".join(node.vetoes))
    if node.status != "healthy":
        return Check("node", False, f"is {node.status}")
    if node.bus_down:
        return Check("node", False, "cannot be given orders: its connection to the bus is down")
    return Check("node", True, "healthy")


def check_selector(model: Model, node: Node) -> Check:
    selector = model.schedule.selector
    if not selector.terms:
        return Check("selector", True, "any node will do")
    missing = selector.why_not(node.labels)
    return Check("selector", not missing, "; ".join(missing) or f"has {selector}", lasting=True)


def free_index(world: World, model: Model, node_id: str) -> int:
    """The lowest that no process of the model has there, of whatever revision and also while it ends."""
    taken = {replica.index for replica in world.on_node.get(node_id, ()) if replica.model == model.name}
    return next(index for index in range(len(taken) + 1) if index not in taken)


def free_slots(world: World, model: Model, node: Node) -> int:
    """How many more replicas of it the node may have."""
    return max(0, max(1, node.max_replicas_per_model) - len(_counted(world, model, node.id)))


def missing_files_bytes(model: Model, node: Node, policy: Policy) -> int | None:
    """What of its files is not there; None: their sizes are not known."""
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


def _slow_to_fetch(model: Model, node: Node, build: Build, policy: Policy) -> int:
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
            return Check("backend", False, f"no build of {model.backend}{reason}", lasting=True)
        case BuildState.FORBIDDEN:
            return Check("backend", False, f"{model.backend} shall not be there{reason}", lasting=True)
        case BuildState.UNKNOWN:
            return Check("backend", False, f"{model.backend}{reason or ': not known whether there is a build for it'}")
        case BuildState.LOOKING:
            return Check("backend", False, f"looking up a build of {model.backend} for it", looking=True)


def _check_slots(world: World, model: Model, node: Node) -> Check:
    most, there = max(1, node.max_replicas_per_model), len(_counted(world, model, node.id))
    return Check("slots", there < most, f"{there} of at most {most} replicas of it there")


def _group_checks(world: World, model: Model, rivals_there: Sequence[Replica]) -> tuple[Check, ...]:
    """Only of a model that has groups, and only where they are more than a preference."""
    if not (model.concurrency_groups and world.policy.exclusive_groups):
        return ()
    if not rivals_there:
        return (Check("group", True, "no other model of its concurrency groups is there"),)
    rival = min(rivals_there, key=lambda replica: replica.model)
    group = shared_groups(world, model, rival)[0]
    return (Check("group", False, f"{rival.model} of the same concurrency group {group!r} is there"),)


def _check_disk(model: Model, node: Node, policy: Policy) -> Check:
    """What has to be fetched and some headroom (docs/reference/wire/budgets-and-labels.md#disk-headroom). A node that
    tells no disk passes."""
    missing = missing_files_bytes(model, node, policy)
    if missing == 0:
        return Check("disk", True, "needs nothing more there")
    if not node.total_disk:
        return Check("disk", True, "does not say how much it has")
    if missing is None:
        need = policy.disk_unknown_bytes
    else:
        need = missing + max(int(missing * policy.disk_share), policy.disk_spare_bytes)
    text = f"{format_bytes(need)} needed on disk, {format_bytes(node.available_disk)} free"
    enough = node.available_disk >= need
    if not enough and not policy.disk_check:
        return Check("disk", True, f"{text}; that does not count, as checking is switched off")
    return Check("disk", enough, text, lasting=True)


def _counted(world: World, model: Model, node_id: str) -> list[Replica]:
    """Those that fill the node's slots: of the present revision, so that a new one can start beside the old one."""
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
        notes.append(f"would rather not be beside {', '.join(sorted({peer.model for peer in peers}))}")
    if fetch:
        notes.append(f"{format_bytes(fetch)} to fetch")
    elif build.state is BuildState.INSTALLED and model.files:
        notes.append("backend and files are there")
    return tuple(notes)


def _rank(verdict: Verdict) -> tuple[Score | None, str, str]:
    """Names are unique; the id decides where somebody made them not."""
    return (verdict.score, verdict.node, verdict.node_id)


def _may_change(verdict: Verdict) -> bool:
    """Whether time alone could make this node take it."""
    return verdict.could_hold and not any(check.lasting for check in verdict.checks if not check.ok)


def _summary(model: Model, verdicts: Sequence[Verdict]) -> str:
    if looking := [verdict.node for verdict in verdicts if verdict.only_looking]:
        return f"looking up a build of {model.backend} for {_few(looking)} …"
    need = model.memory
    what = f"{model.name} (needs {format_bytes(need.total_bytes)}: {need.how})" if need.known else model.name
    if not verdicts:
        return f"no place for {what}: there are no nodes"
    if len(verdicts) == 1:
        return f"no place for {what}: {verdicts[0].node}: {verdicts[0].why_not}"
    causes: dict[str, list[str]] = {}
    for verdict in verdicts:
        first = next(check.name for check in verdict.checks if not check.ok)
        causes.setdefault(first, []).append(verdict.node)
    told = ", ".join(f"{len(names)} for {cause} ({_few(names)})" for cause, names in causes.items())
    return f"no place for {what} on {len(verdicts)} nodes: {told}"


def _few(names: Sequence[str], most: int = 3) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
