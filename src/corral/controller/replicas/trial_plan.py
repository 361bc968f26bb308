"""Plans the replicas of a revision that is on trial, beside those of the present one. Pure.

As many as its share of the requests needs; more start when the share grows, none ends before the trial does. Nothing is
evicted for them, and no request waits for them.
"""

from __future__ import annotations

from corral.controller.replicas.lifecycle import HEALTHY
from corral.controller.replicas.model_plan import current_world, placed_row, reasons_text
from corral.controller.replicas.plan_input import PlanInput, PlanResult, Trial
from corral.controller.rollouts.trial import replicas_for
from corral.controller.scheduler.placement import NoCapacity, Placed, choose_node
from corral.controller.scheduler.world import Model, World
from corral.store.records import DesiredReplica, ReplicaStage

_HERE = (HEALTHY, "unhealthy")


def plan_trial_replicas(data: PlanInput, result: PlanResult, trial: Trial) -> None:
    name = trial.model.name
    model = data.world.models.get(name)
    if model is None or model.disabled:
        return  # the model's own plan has retired all of its replicas
    living = [row for row in result.rows.of_model(name) if row.stage is not ReplicaStage.LEAVING]
    own = [row for row in living if data.is_on_trial(row)]
    for row in own:
        if _status(data, row) not in _HERE:
            result.retire(row, f"its node is {_status(data, row)}, and the revision is on trial", data.now)
    count = sum(_status(data, row) in _HERE for row in own)
    old = sum(row.revision == model.revision and row.stage is ReplicaStage.RUNNING for row in living)
    # A start that fails is not repeated in the same pass: its failure decides first whether the trial goes on.
    missing = 0 if name in result.trial_failures else replicas_for(trial.share, old) - count
    for _ in range(missing):
        found = choose_trial_node(current_world(data, result), model, trial.model)
        if not isinstance(found, Placed):
            result.trial_waits[name] = reasons_text(found)
            return
        row = placed_row(trial.model, found, data.now)
        result.rows[row.key] = row
        result.events.append(("replica of a revision on trial placed", row))


def choose_trial_node(world: World, present: Model, new: Model) -> Placed | NoCapacity:
    """A node of a hardware class that serves the present revision, if one has room: times of different machines cannot
    be compared."""
    serving = {
        world.nodes[replica.node_id].hardware
        for replica in world.of_model.get(present.name, ())
        if replica.revision == present.revision and replica.node_id in world.nodes
    }
    alike = {node.id for node in world.nodes.values() if node.hardware in serving}
    found = choose_node(world, new, only=alike)
    return found if isinstance(found, Placed) else choose_node(world, new)


def _status(data: PlanInput, row: DesiredReplica) -> str:
    host = data.hosts.get(row.node_id)
    return host.status if host is not None else "gone"
