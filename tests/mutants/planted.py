"""Faults planted by hand: each is a mistake somebody could make, in code that must not have it.

`find` is looked for as syntax, in the function of that name wherever it is. When a function is rewritten, write its
fault anew: one that can no longer be planted fails `tests/unit/test_planted_faults.py`.
"""

from __future__ import annotations

from tests.mutants.catalog import PlantedFault
from tests.mutants.planted_shells import PLANTED_IN_SHELLS

_CONTROLLER = "corral.controller"

PLANTED = (
    # Replicas: what is taken in, ended, shown.
    PlantedFault(
        "adopt-any-revision",
        f"{_CONTROLLER}.replicas.plan",
        "_is_wanted",
        "process.revision in allowed",
        "True",
        "a leftover process of any revision becomes a replica (invariant 2)",
    ),
    PlantedFault(
        "adopt-under-present-revision",
        f"{_CONTROLLER}.replicas.plan",
        "_adopted_row",
        "process.revision",
        "data.world.models[process.model].revision",
        "a process of an earlier revision is taken for one of the present (invariant 2)",
    ),
    PlantedFault(
        "reap-busy-leftover",
        f"{_CONTROLLER}.replicas.plan",
        "_adopt_orphans",
        "idle.in_flight == 0",
        "True",
        "a leftover process is ended while it has requests (invariant 5)",
    ),
    PlantedFault(
        "reap-unheard-leftover",
        f"{_CONTROLLER}.replicas.plan",
        "_adopt_orphans",
        "idle.known",
        "True",
        "a leftover process is ended before anybody can know whether it is busy (invariant 5)",
        # It is ended 120 s after a leader first saw it, and by then its load was heard, unless the bus has trouble:
        # then the simulation cannot say who should have known.
        simulated=False,
    ),
    PlantedFault(
        "stop-busy-replica",
        f"{_CONTROLLER}.replicas.lifecycle",
        "_may_end",
        "activity.known and activity.in_flight == 0",
        "True",
        "a replica that leaves is stopped while it has requests (invariant 5)",
    ),
    PlantedFault(
        "show-leaving-replica",
        f"{_CONTROLLER}.inventory.routable",
        "routable",
        "(listing.node_id, process.model, process.replica) not in leaving",
        "True",
        "gateways are shown a replica that is about to end (invariant 2)",
    ),
    PlantedFault(
        "show-two-revisions",
        f"{_CONTROLLER}.inventory.routable",
        "routable",
        "replica.revision in (answering[replica.model], models[replica.model].on_trial)",
        "True",
        "two revisions of a model answer at once (invariant 2)",
    ),
    # Memory and placement.
    PlantedFault(
        "ram-spare-added",
        f"{_CONTROLLER}.scheduler.free_memory",
        "_ram_pool",
        "node.available_ram - spare",
        "node.available_ram + spare",
        "more memory is handed out than the machine has free",
    ),
    PlantedFault(
        "starting-memory-unseen",
        f"{_CONTROLLER}.scheduler.free_memory",
        "_PoolUsage.add",
        "size if starting else 0",
        "0",
        "memory of replicas that are still starting is handed out again",
    ),
    PlantedFault(
        "device-id-or",
        f"{_CONTROLLER}.scheduler.free_memory",
        "is_same_device",
        "device.uuid and named.uuid",
        "device.uuid or named.uuid",
        "a device whose id only one side tells is taken for another",
        simulated=False,  # simulated machines have no devices
    ),
    PlantedFault(
        "device-vendor-or",
        f"{_CONTROLLER}.scheduler.free_memory",
        "is_same_device",
        "device.index == named.index and device.vendor == named.vendor",
        "device.index == named.index or device.vendor == named.vendor",
        "what one device holds is counted on all of its vendor",
        simulated=False,  # simulated machines have no devices
    ),
    PlantedFault(
        "ram-replicas-or",
        f"{_CONTROLLER}.scheduler.free_memory",
        "_sum_usage",
        "stays and not replica.devices",
        "stays or not replica.devices",
        "replicas on devices, and those that are gone, are counted in RAM",
        simulated=False,  # too little memory is handed out, never too much; and no simulated replica is on a device
    ),
    PlantedFault(
        "place-on-unhealthy-node",
        f"{_CONTROLLER}.scheduler.placement",
        "check_node",
        "node.status != 'healthy'",
        "False",
        "new replicas are placed on nodes that are offline or drained",
    ),
    PlantedFault(
        "place-without-bus",
        f"{_CONTROLLER}.scheduler.placement",
        "check_node",
        "node.bus_down",
        "False",
        "new replicas are placed on nodes that hear no orders",
    ),
    PlantedFault(
        "ignore-selector",
        f"{_CONTROLLER}.scheduler.placement",
        "check_selector",
        "not missing",
        "True",
        "replicas are placed where the schedule's labels do not allow it",
    ),
    PlantedFault(
        "evict-below-minimum",
        f"{_CONTROLLER}.scheduler.eviction",
        "EvictionRules._permanent_reason",
        "left < least",
        "False",
        "a model is evicted below its min_replicas (invariant 8)",
    ),
    PlantedFault(
        "evict-busy",
        f"{_CONTROLLER}.scheduler.eviction",
        "EvictionRules._temporary_reason",
        "not replica.idle",
        "False",
        "a replica with requests has to give way for another model (invariant 5)",
    ),
    PlantedFault(
        "trim-below-minimum",
        f"{_CONTROLLER}.scheduler.scaling",
        "_trim",
        "max(schedule.min_replicas, 1)",
        "0",
        "an unused replica ends though it is the last that min_replicas asks for (invariant 8)",
    ),
    PlantedFault(
        "tries-at-once-all-count",
        f"{_CONTROLLER}.scheduler.scaling",
        "_unsatisfied",
        "ticks and until is not None and now < until",
        "False",
        "a schedule waits five minutes because nothing was free for two seconds",
        simulated=False,  # a seed may last long enough for the pause to end
    ),
    PlantedFault(
        "grow-beyond-maximum",
        f"{_CONTROLLER}.scheduler.scaling",
        "_grow",
        "len(state.counted) >= schedule.max_replicas",
        "False",
        "a busy model gets more replicas than max_replicas",
    ),
    # Concurrency groups.
    PlantedFault(
        "rivals-unseen",
        f"{_CONTROLLER}.scheduler.groups",
        "rivals",
        "not model.concurrency_groups",
        "True",
        "two models of an exclusive group are placed on one node",
    ),
    PlantedFault(
        "ending-rival-unseen",
        f"{_CONTROLLER}.scheduler.groups",
        "rivals",
        "exclusive or replica.state is not ReplicaState.STOPPING",
        "replica.state is not ReplicaState.STOPPING",
        "a model is placed beside one of its exclusive group that has not ended yet",
    ),
    PlantedFault(
        "first-group-only",
        f"{_CONTROLLER}.scheduler.groups",
        "shared_groups",
        "set(model.concurrency_groups) & set(other.concurrency_groups)",
        "set(model.concurrency_groups[:1]) & set(other.concurrency_groups[:1])",
        "only the first group of a model keeps it apart from others",
    ),
    PlantedFault(
        "rivals-never-part",
        f"{_CONTROLLER}.scheduler.groups",
        "why_must_leave",
        "_precedence(other, rival) < _precedence(model, replica)",
        "False",
        "two models whose definitions were given a common group stay on one node",
    ),
    # Loads.
    PlantedFault(
        "load-without-cooldown",
        "corral.store.records",
        "LoadJob.may_try",
        "self.retry_at <= now",
        "True",
        "a load that failed is tried again at once, for ever",
    ),
    PlantedFault(
        "load-version-falls",
        "corral.store.records",
        "_newer",
        "max(stamp, before.version + 1)",
        "stamp",
        "whoever waits for a newer version of a load waits in vain (invariant 9)",
        simulated=False,  # in simulated time no two changes fall into one millisecond
    ),
    # Health.
    PlantedFault(
        "no-mass-outage-guard",
        f"{_CONTROLLER}.health.classify",
        "_is_mass_outage",
        "gone >= guard.floor",
        "False",
        "a cut network takes the whole fleet offline (invariant 8)",
    ),
    PlantedFault(
        "judge-after-own-outage",
        f"{_CONTROLLER}.health.classify",
        "classify",
        "observed_s < stale_after_s",
        "False",
        "nodes go offline because the controller could not hear or write (invariant 7)",
        simulated=False,  # `is_still_true` asks again before anything is written
    ),
    PlantedFault(
        "carry-out-after-own-outage",
        f"{_CONTROLLER}.health.classify",
        "is_still_true",
        "observed_s >= stale_after_s",
        "True",
        "a verdict from before an outage of the controller's own is carried out after it (invariant 7)",
        simulated=False,  # `judge` asks first
    ),
    PlantedFault(
        "never-silent",
        f"{_CONTROLLER}.health.classify",
        "_is_silent",
        "abs(pulse.heartbeat_age_s) >= stale_after_s",
        "False",
        "a node that is gone stays healthy for ever",
    ),
    PlantedFault(
        "never-back",
        f"{_CONTROLLER}.health.classify",
        "_is_back",
        "is_younger and abs(pulse.heartbeat_age_s) < stale_after_s",
        "False",
        "a node that was offline is never healthy again",
    ),
    # Heartbeats.
    PlantedFault(
        "heartbeats-lost-on-failed-flush",
        f"{_CONTROLLER}.registry.heartbeats",
        "Heartbeats.flush",
        "self._waiting = kept | self._waiting",
        "pass",
        "heartbeats that could not be written are forgotten",
    ),
    PlantedFault(
        "http-bus-down-ignored",
        f"{_CONTROLLER}.registry.heartbeats",
        "Heartbeats.receive_http",
        "beat.bus == 'down'",
        "False",
        "a node that says its bus is down still gets orders",
    ),
    # Backends: orders, proof, cancels.
    PlantedFault(
        "success-without-digest",
        f"{_CONTROLLER}.desired.plan",
        "_Backend._is_it",
        "self._evidence(there, build, want)",
        "Evidence.MATCHES",
        "any build that is there counts as the one that was asked for (invariant 3)",
    ),
    PlantedFault(
        "order-to-unhealthy-node",
        f"{_CONTROLLER}.desired.plan",
        "_Backend._away",
        "node.status != 'healthy'",
        "False",
        "orders are sent to nodes that are offline or drained",
    ),
    PlantedFault(
        "order-without-bus",
        f"{_CONTROLLER}.desired.plan",
        "_Backend._away",
        "node.bus_down",
        "False",
        "orders are sent to nodes that hear none",
    ),
    PlantedFault(
        "unsure-order-forgotten",
        f"{_CONTROLLER}.desired.plan",
        "_Backend._is_unsure",
        "due or intent.epoch != self.epoch",
        "False",
        "an order whose controller died is never sent again (invariant 6)",
    ),
    PlantedFault(
        "cancel-not-sent",
        f"{_CONTROLLER}.desired.plan",
        "_Backend._is_to_be_stopped",
        "intent.operation_id in self.node.stopping",
        "False",
        "a cancelled install goes on downloading",
    ),
    # Progress.
    PlantedFault(
        "progress-falls",
        f"{_CONTROLLER}.operations.state",
        "merge_progress",
        "max(row.percentage, event.percentage)",
        "event.percentage",
        "the percentage of an attempt goes backwards (invariant 9)",
    ),
    PlantedFault(
        "late-event-merged",
        f"{_CONTROLLER}.operations.state",
        "merge_progress",
        "(attempt, event.seq) <= (row.attempt, row.seq)",
        "False",
        "an event that comes late undoes a newer one (invariant 9)",
    ),
    PlantedFault(
        "event-after-end-merged",
        f"{_CONTROLLER}.operations.state",
        "merge_progress",
        "row.status in ENDED",
        "False",
        "a row that has ended moves again (invariant 9)",
        simulated=False,  # the store refuses to write such a row
    ),
    # Releases of Corral.
    PlantedFault(
        "old-release-accepted",
        "corral.worker.upgrade.release_pin",
        "check_order",
        "order.counter < pin.counter",
        "False",
        "a recorded order brings an old version of Corral back",
    ),
    PlantedFault(
        "release-without-canary",
        f"{_CONTROLLER}.releases.plan",
        "choose_turns",
        "row.node_id in ready and row.node_id not in step.held",
        "row.node_id in ready",
        "all nodes of a class are upgraded before one has shown that the version works",
    ),
    PlantedFault(
        "bad-release-goes-on",
        f"{_CONTROLLER}.releases.plan",
        "_node",
        "row.phase == BAD_VERSION",
        "False",
        "a version that does not work on one node is tried on the next one",
    ),
    PlantedFault(
        "release-forgotten-by-next-leader",
        f"{_CONTROLLER}.releases.upgrades",
        "CorralUpgrades._advance",
        "row.status is OperationNodeStatus.DOWNLOADING",
        "False",
        "an upgrade whose controller died is never ended (invariant 6)",
    ),
    *PLANTED_IN_SHELLS,
)
