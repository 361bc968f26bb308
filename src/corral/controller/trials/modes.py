"""How a new revision of a model is tried: beside the old one, or in its place. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from corral.contract.models import Definition
from corral.controller.replicas.trial_plan import choose_trial_node
from corral.controller.rollouts.trial import SHARES
from corral.controller.scheduler.placement import NoCapacity, evaluate_node
from corral.controller.scheduler.world import Model, ReplicaState, World

_JUDGED = "it is judged by its requests against those of the hour before, and the old revision returns if it is worse"


@dataclass(frozen=True)
class TrialMode:
    in_place: bool
    plan: str  # a sentence


def choose_mode(world: World, present: Model, new: Model, old: Definition, definition: Definition) -> TrialMode:
    """`present` and `new`: the model as its two revisions have it."""
    serving = [
        replica
        for replica in world.of_model.get(present.name, ())
        if replica.revision == present.revision and replica.state is not ReplicaState.STOPPING
    ]
    if not serving:
        why = "no replica of the model runs: the new revision serves from the next request on"
        return TrialMode(True, f"{why}; {_JUDGED}")
    if changed := changed_files(old, definition):
        why = f"{', '.join(changed)}: the file has another source under the same path, so both cannot be kept"
        return TrialMode(True, f"{why}; {_switch()}")
    found = choose_trial_node(world, present, new)
    if isinstance(found, NoCapacity):
        return TrialMode(True, f"no node has room for both revisions ({found.text}); {_switch()}")
    shares = ", ".join(f"{share} %" for share in SHARES)
    hosts = [world.nodes[each.node_id] for each in serving if each.node_id in world.nodes]
    names = sorted({node.name for node in hosts})
    where = f"beside the old one on {found.node}"
    if found.node not in names:
        where = f"on another node, {found.node}"
        if not any(evaluate_node(world, new, node).eligible for node in hosts):
            where += f": {', '.join(names)} cannot hold both revisions"
    if world.nodes[found.node_id].hardware not in {node.hardware for node in hosts}:
        where += (
            f" (of another hardware class, {world.nodes[found.node_id].hardware}: its times may differ for that reason)"
        )
    plan = f"a replica of the new revision starts {where}; it gets {shares} of the requests, each a third of the soak"
    return TrialMode(False, plan)


def changed_files(old: Definition, new: Definition) -> Sequence[str]:
    """Paths that both definitions have, with different contents. The fleet knows a file of a model by its path."""
    before = {file.path: (file.uri, file.sha256) for file in old.files}
    return [file.path for file in new.files if file.path in before and before[file.path] != (file.uri, file.sha256)]


def _switch() -> str:
    return (
        "so the old replica stops first, and gateways hold the requests until the new one is ready, as long as the "
        f"model's load_wait allows; then {_JUDGED}"
    )
