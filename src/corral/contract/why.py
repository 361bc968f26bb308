"""Why a model is, or is not, where it is: what `corral why` shows (`GET /api/why/…`). Since protocol 1.

Sizes are bytes. Texts are sentences for people; programs match `decision`, `state` and the names of checks.
"""

from __future__ import annotations

from corral.contract.admin import OperationView
from corral.contract.codec import Message, always
from corral.contract.loads import LoadStatus
from corral.contract.rollouts import RolloutView

DECISIONS = {  # of WhyModel, in words before its text; none where that says it itself
    "placed": "can be placed",
    "make_room": "needs an eviction",
    "wait": "waiting",
    "no_room": "",
}


def said_once(text: str, before: str) -> str:
    """`text` for a reader who has just read `before`: scaling and loads often tell the decision's own sentence."""
    return text.replace(before, "see above") if before else text


class WhyOperation(Message, frozen=True):
    """How far an operation is, and what the rest waits for."""

    operation: OperationView
    lines: tuple[str, ...] = ()  # sentences, with the numbers that decide
    rollout: RolloutView | None = None  # of an upgrade, or of a new revision of a model


class WhyRollout(Message, frozen=True):
    """How far a rollout is, and the figures that decide about it."""

    rollout: RolloutView
    lines: tuple[str, ...] = ()  # sentences, with the numbers that decide


class WhyCheck(Message, frozen=True):
    """One condition a node has to meet, with the numbers that were compared."""

    name: str = always(str)  # node, selector, backend, slots, disk, memory
    ok: bool = always(bool)
    text: str = always(str)


class WhyScore(Message, frozen=True):
    """One line of the ranking: nodes are compared by the first, then the second, and so on; the smaller value wins."""

    name: str = always(str)
    value: str = always(str)
    meaning: str = ""


class WhyVerdict(Message, frozen=True):
    """What was found about one node for one model."""

    node_id: str = always(str)
    node: str = always(str)
    model: str = always(str)
    eligible: bool = always(bool)
    text: str = ""  # why not; or where on it the process would go
    checks: tuple[WhyCheck, ...] = ()
    score: tuple[WhyScore, ...] = ()  # of an eligible one
    notes: tuple[str, ...] = ()
    devices: tuple[int, ...] = ()
    memory_bytes: int = 0
    fetch_bytes: int = 0


class WhyReplica(Message, frozen=True):
    node: str = always(str)
    model: str = always(str)
    replica: int = always(int)
    state: str = always(str)  # starting, ready, stopping; node offline, whatever was heard of it before
    process_id: str = ""
    current: bool = True  # of the model's present revision
    on_trial: bool = False  # of a new revision that is tried on a share of the requests
    in_flight: int = 0
    slots: int = 1
    memory_bytes: int = 0
    devices: tuple[int, ...] = ()
    unused_s: float | None = None
    kept: str = ""  # why it would not give way to another model; empty: it would
    reason: str = ""  # what was said when it was placed, or since


class WhyModel(Message, frozen=True):
    model: str = always(str)
    decision: str = always(str)  # placed, make_room, wait, no_room: where the next replica would go
    text: str = always(str)
    memory_bytes: int = 0  # of one process; 0: unknown
    host_bytes: int = 0
    memory_how: str = ""
    selector: str = ""
    min_replicas: int = 0
    max_replicas: int = 0
    spread_all: bool = False
    waiting: int = 0
    scaling: str = ""  # up, down, hold, unsatisfied
    scaling_text: str = ""
    replicas: tuple[WhyReplica, ...] = ()
    kept: tuple[str, ...] = ()  # of no_room: who is in the way and may not go
    load: LoadStatus | None = None  # how far its load is, where it is being loaded
    nodes: tuple[WhyVerdict, ...] = ()  # best first
    streams: str = ""  # what becomes of streams that break off; empty: its definition has no `resume_streams`
    streams_limited: bool = False  # on some node, or on all, they are not continued


class WhySpace(Message, frozen=True):
    """Memory of one device, or RAM."""

    name: str = always(str)
    limit_bytes: int | None = None  # that may be used for models; None: the machine does not say
    free_bytes: int | None = None
    reserved_bytes: int = 0
    replicas: int = 0
    measured: bool = True
    text: str = ""


class WhyNode(Message, frozen=True):
    node_id: str = always(str)
    node: str = always(str)
    accepts: bool = always(bool)
    text: str = always(str)  # why it takes no new replicas, or that it does
    spaces: tuple[WhySpace, ...] = ()
    budget_bytes: int | None = None
    left_of_budget: int | None = None
    replicas: tuple[WhyReplica, ...] = ()
    models: tuple[WhyVerdict, ...] = ()  # each model of the catalogue, judged for this node
