"""Previews what a request does on each node: for `?plan=true`, and for the first state of its rows. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from corral.contract.admin import PlanClass, PlanNode, PlanProcess
from corral.contract.messages.replicas import ReplicaProcess
from corral.contract.sources import is_path_on_node
from corral.controller.backends.plan import NoBuild
from corral.controller.backends.replacement import memory_beside, processes_of, start_took_s
from corral.controller.backends.rules import Wanted
from corral.controller.inventory.installed import Installed
from corral.controller.operations.requests import Candidate, Elsewhere, OperationKind, OperationRequest, ResolvedRequest
from corral.controller.rollouts.hardware_class import hardware_of
from corral.controller.rollouts.options import describe_soak
from corral.kit.humanize import format_bytes
from corral.store.records import OperationNode, ScopeKind, TargetBuild, Want
from corral.store.tables.nodes import NodeOutline

SAME_BUILD = "it has this build already"
CANNOT_CHOOSE = "a LocalAI worker cannot be told which version to run"
PATH_ON_NODE = "the URI is a path on the node, which checks when it installs whether a build is there"
NOTHING = "nothing"  # the action of a node that needs no change
BESIDE, IN_PLACE, STOP = "beside", "in_place", "stop"
# The downloaded archive stays in the cache beside the unpacked files, which are at least as large.
_DISK_PER_BYTE = 2
_NODES_SHOWN = 3
_DIGEST_SHOWN = len("sha256:") + 12


def preview(resolved: ResolvedRequest) -> tuple[PlanNode, ...]:
    """One per node, in name order."""
    return tuple(_node(resolved, candidate) for candidate in resolved.candidates)


def changes_nothing(resolved: ResolvedRequest, nodes: Sequence[PlanNode]) -> bool:
    """Whether every node has the build of an upgrade or rollback already. (An install is a success then.)"""
    return resolved.want is Want.UPGRADED and bool(nodes) and all(node.action == NOTHING for node in nodes)


def unchanged_words(resolved: ResolvedRequest, nodes: Sequence[PlanNode | OperationNode]) -> str:
    """The sentence for that: `vllm: nothing newer on any node (1.0 is installed)`."""
    scope = resolved.request.scope
    where = {ScopeKind.ALL: "any node", ScopeKind.SELECTOR: f"nodes with {scope.value}"}.get(scope.kind)
    versions = ", ".join(sorted({node.version or node.digest[:_DIGEST_SHOWN] for node in nodes}))
    nothing = "nothing to go back to" if resolved.request.kind is OperationKind.ROLLBACK else "nothing newer"
    return f"{resolved.backend}: {nothing} on {where or nodes[0].node_name} ({versions} is installed)"


def rollout_notes(request: OperationRequest) -> list[str]:
    """How the switches of an upgrade or a rollback proceed."""
    parallel, settings = request.max_parallel, request.rollout
    notes = [
        "every node fetches first; then one node of each hardware class switches, "
        f"then {parallel} of the nodes at once; the first that fails to switch stops the rest, "
        "and a second failure reverts those that have switched"
    ]
    if settings.has_soak:
        notes.append(
            f"the first node of each class soaks for {describe_soak(settings)}: the rollout is reverted if failed "
            f"requests rise by more than {100 * settings.max_errors:g} %, if the median time to first token or "
            f"tokens/s is {settings.max_slowdown:g} times as bad, or if its processes end by themselves"
        )
        few = "it waits for more, or for `corral rollouts promote`" if settings.soak_requests else "it passes"
        notes.append(f"with fewer than {settings.min_requests} requests of each build a class is not judged: {few}")
    return notes


def rollout_classes(resolved: ResolvedRequest, nodes: Sequence[PlanNode]) -> tuple[PlanClass, ...]:
    """The hardware classes of the nodes that an upgrade changes, in name order; those that serve come first."""
    own: dict[str, list[PlanNode]] = {}
    for node, candidate in zip(nodes, resolved.candidates, strict=True):
        if node.action not in (NOTHING, "skip"):
            own.setdefault(hardware_of(candidate.outline), []).append(node)
    return tuple(_class(name, own[name]) for name in sorted(own))


def _class(name: str, nodes: Sequence[PlanNode]) -> PlanClass:
    ordered = sorted(nodes, key=lambda node: (node.waits, not node.replaces, node.node_name))
    sizes = [node.fetch_bytes for node in nodes]
    gaps = [process.gap_s for node in nodes for process in node.replaces]
    return PlanClass(
        name,
        tuple(node.node_name for node in ordered),
        sum(size for size in sizes if size is not None) if None not in sizes else None,
        max((gap for gap in gaps if gap is not None), default=0.0) if None not in gaps else None,
    )


def _node(resolved: ResolvedRequest, candidate: Candidate) -> PlanNode:
    outline = candidate.outline
    build = resolved.builds.get(candidate.kind)
    there = candidate.find(resolved.backend, build.variant if isinstance(build, TargetBuild) else "")
    known: dict[str, Any] = {
        "node_id": outline.id,
        "node_name": outline.name,
        "installed_version": there.version if there is not None else "",
        "installed_digest": there.digest if there is not None else "",
    }
    if outline.status != "healthy" or outline.bus_down:
        known |= {"waits": True, "reason": f"node {outline.status}, will be done when it is healthy"}
    if resolved.want is Want.ABSENT:
        return _delete(known, resolved.backend, candidate, there)
    if resolved.request.kind is OperationKind.ROLLBACK and outline.protocol == 0:
        return _left_alone(known, "skip", CANNOT_CHOOSE)
    match build:
        case None:
            action = "upgrade" if there is not None else "install"
            return PlanNode(**(known | {"action": action, "reason": "its build is being looked up"}))
        case NoBuild(reason):
            return _left_alone(known, "skip", reason)
        case TargetBuild():
            return _have(resolved, known, candidate, there, build)


def _left_alone(known: dict[str, Any], action: str, reason: str) -> PlanNode:
    return PlanNode(**(known | {"action": action, "reason": reason, "waits": False}))


def _delete(known: dict[str, Any], backend: str, candidate: Candidate, there: Installed | None) -> PlanNode:
    if candidate.known and there is None and not isinstance(candidate.want, Wanted):
        return _left_alone(known, NOTHING, "not installed there")
    if there is not None and there.system:
        return _left_alone(known, "skip", "it belongs to the system there and cannot be removed")
    stopped = [PlanProcess(each.process_id, each.model, STOP) for each in _processes(candidate, backend)]
    words = f"{_counted(stopped)} stopped first" if stopped else "those that run are stopped first"
    return PlanNode(**known, action="delete", processes=words, replaces=tuple(stopped))


def _have(
    resolved: ResolvedRequest, known: dict[str, Any], candidate: Candidate, there: Installed | None, build: TargetBuild
) -> PlanNode:
    force, outline = resolved.request.force, candidate.outline
    known |= {"variant": build.variant, "version": build.version, "digest": build.digest}
    on_node = PATH_ON_NODE if is_path_on_node(resolved.request.backend_request.uri) else ""
    if notes := [part for part in (known.get("reason", ""), build.note, on_node) if part]:
        known["reason"] = "; ".join(notes)
    if there is not None and build.digest and there.digest == build.digest and not force:
        return _left_alone(known, NOTHING, SAME_BUILD)
    on_disk = there is not None and bool(build.digest) and build.digest in there.beside and not force
    known["fetch_bytes"] = fetch = 0 if on_disk else build.size_bytes or None
    if fetch is not None and outline.total_disk:
        known["disk_after_bytes"] = max(0, outline.available_disk - _DISK_PER_BYTE * fetch)
    if there is None:
        return PlanNode(**known, action="install")
    # Only the switches of a rollout wait for another node.
    moves = resolved.want is Want.UPGRADED and not force
    known |= _replacing(candidate, resolved.backend, resolved.elsewhere, moves=moves)
    return PlanNode(**known, action="reinstall" if force else "upgrade")


def _replacing(candidate: Candidate, backend: str, elsewhere: Elsewhere, *, moves: bool) -> dict[str, Any]:
    """A Corral worker starts the new process first; if that does not serve, the old one never stopped."""
    outline = candidate.outline
    if outline.protocol == 0:
        return {"processes": "the worker stops those that run; they start again when they are next needed"}
    running = _processes(candidate, backend)
    if not running:
        return {"processes": "none runs"} if candidate.known else {}
    need = memory_beside(running, free_vram=outline.available_vram, free_ram=outline.available_ram)
    if need.fits:
        replaced = [PlanProcess(each.process_id, each.model, BESIDE, 0.0, each.memory_bytes) for each in running]
        beside = f"starts beside it ({need.words})" if need.words else "starts beside it"
        words = f"{_counted(replaced)} replaced: the new version {beside}, takes over when it serves; no gap"
        return {"processes": words, "replaces": tuple(replaced)}
    replaced = [_in_place(each, outline, elsewhere, moves=moves) for each in running]
    longest = max((each.gap_s for each in replaced if each.gap_s is not None), default=None)
    gap = f"a gap of about {longest:.0f} s" if longest is not None else "a gap as long as its start takes"
    words = (
        f"{_counted(replaced)} replaced in place: memory does not hold two ({need.words}), so the old one ends first; "
        f"{gap}; {_meanwhile(replaced)}"
    )
    return {"processes": words, "replaces": tuple(replaced)}


def _in_place(process: ReplicaProcess, node: NodeOutline, elsewhere: Elsewhere, *, moves: bool) -> PlanProcess:
    others = tuple(name for name in elsewhere.serving.get(process.model, ()) if name != node.name)
    able = [
        each
        for each in elsewhere.healthy
        if each.id != node.id
        and (each.os, each.arch) == (node.os, node.arch)
        and memory_beside((process,), free_vram=each.available_vram, free_ram=each.available_ram).fits
    ]
    alone = bool(process.model) and not others
    with_backend = [each for each in able if process.backend in elsewhere.installed.get(each.id, frozenset())]
    freest = max(with_backend, key=lambda each: (each.available_vram, each.available_ram), default=None)
    return PlanProcess(
        process.process_id,
        process.model,
        IN_PLACE,
        start_took_s(process),
        process.memory_bytes,
        others,
        tuple(each.name for each in able) if alone else (),
        freest.name if freest is not None and alone and moves else "",
    )


def _meanwhile(replaced: Sequence[PlanProcess]) -> str:
    """What happens to requests for each model during the gap."""
    words = []
    for each in {process.model: process for process in replaced if process.model}.values():
        if each.served_by:
            words.append(f"{each.model} is served by {', '.join(each.served_by)} meanwhile")
            continue
        if each.moves_to:
            size = f" ({format_bytes(each.memory_bytes)})" if each.memory_bytes else ""
            words.append(f"{each.moves_to} takes {each.model} first{size}, so that no request waits for it")
            continue
        words.append(f"no other node serves {each.model}: requests wait at the gateway")
        if each.could_serve:
            free = ", ".join(each.could_serve[:_NODES_SHOWN])
            words.append(
                f"with the memory for it: {free}; `corral models scale {each.model} --min 2` first avoids that"
            )
    return "; ".join(words)


def _processes(candidate: Candidate, backend: str) -> list[ReplicaProcess]:
    if candidate.inventory is None or not candidate.known:
        return []
    return processes_of(candidate.inventory.processes, candidate.inventory.backends, backend)


def _counted(processes: Sequence[PlanProcess]) -> str:
    return "1 process is" if len(processes) == 1 else f"{len(processes)} processes are"
