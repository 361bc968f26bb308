"""Replicas and models for the router: prepared when the view changes, only looked up per request."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from urllib.parse import quote, urlsplit

from corral.contract.http import Target
from corral.contract.manifest import Continues
from corral.contract.view import FleetView, ViewModel, ViewNode, ViewReplica
from corral.gateway.routing.in_flight import InFlight, SlotCounter
from corral.gateway.routing.local_sockets import LocalSockets
from corral.gateway.routing.pick import Policy
from corral.gateway.routing.prefixes import PrefixIndex
from corral.gateway.routing.queue import FairQueue

MAX_ROUTES = 64
_MODEL_IN_QUERY = re.compile(rb"([?&]model=)[^&]*")
_NO_COUNTER = SlotCounter()


class ReplicaTarget:
    """One process that serves a model."""

    __slots__ = ("continues", "counter", "node_name", "path_prefix", "routes", "seen", "target", "token")

    def __init__(
        self,
        seen: ViewReplica,
        node: ViewNode,
        target: Target,
        counter: SlotCounter,
        continues: Continues | None = None,
    ) -> None:
        self.seen = seen
        self.continues = continues  # how it goes on with a broken stream; None: it cannot, or its model does not ask
        self.node_name = node.name
        self.target = target
        self.token = node.ingress_token.encode()
        self.path_prefix = f"/replicas/{quote(seen.process_id, safe='')}".encode()  # on the ingress
        self.counter = counter
        self.routes: dict[bytes, Route] = {}

    def route(self, path: bytes, requested_model: str) -> Route:
        """The route to a path of the replica. Cached for requests by the model's own name."""
        if requested_model != self.seen.model:
            return self.route_as(path, requested_model)
        route = self.routes.get(path)
        if route is None:
            if len(self.routes) >= MAX_ROUTES:
                self.routes.clear()
            route = self.routes[path] = Route(self.target, self.path_prefix + path, self.token, self, requested_model)
        return route

    def route_as(self, path: bytes, requested_model: str, *, is_stand_in: bool = False) -> Route:
        """The route for a request that names another model: an alias, or a model for which this one stands in."""
        if b"?" in path:
            own = quote(self.seen.model, safe="").encode()
            path = _MODEL_IN_QUERY.sub(lambda found: found[1] + own, path)
        return Route(self.target, self.path_prefix + path, self.token, self, requested_model, is_stand_in=is_stand_in)


class Route:
    """Where a request goes: the worker's ingress, the path there, and the ingress token. The router has taken a slot of
    the replica for it: the receiver calls `counter.end` once."""

    __slots__ = ("counter", "ingress_token", "is_stand_in", "path", "replica", "requested_model", "target")

    def __init__(
        self,
        target: Target,
        path: bytes,
        ingress_token: bytes,
        replica: ReplicaTarget | None = None,
        requested_model: str = "",
        *,
        is_stand_in: bool = False,
    ) -> None:
        self.target = target
        self.path = path
        self.ingress_token = ingress_token
        self.replica = replica
        self.counter = _NO_COUNTER if replica is None else replica.counter
        self.requested_model = requested_model  # as the client named it
        self.is_stand_in = is_stand_in  # the replica serves while the requested model is loading


class ModelQueue(FairQueue[object]):
    """The queue of one model. A waiter gets a replica with a slot taken, or the error to send."""

    def __init__(self, on_slot_free: Callable[[], None]) -> None:
        super().__init__()
        self.on_slot_free = on_slot_free
        self.ready_at: float | None = None  # since when the model has replicas; None: it is cold


@dataclass(slots=True)
class ModelRoute:
    """The state of one model: its replicas, their ranks, its queue and its prefixes."""

    model: ViewModel
    policy: Policy
    queue: ModelQueue
    prefixes: PrefixIndex
    replicas: tuple[ReplicaTarget, ...] = ()
    ranks: list[int] = field(default_factory=list)  # written by each replica's SlotCounter
    index_by_process: dict[str, int] = field(default_factory=dict)
    turn: int = 0  # the index at which the next choice starts
    leaving: tuple[SlotCounter, ...] = ()  # of replicas that left the view and have requests of ours in flight
    split: TrafficSplit | None = None  # while another revision is on trial: choose among the replicas of one of them

    @property
    def resumes_streams(self) -> bool:
        """Whether a stream that breaks off may be continued: its definition asks for it, and a replica can."""
        return self.model.resume_streams and any(replica.continues is not None for replica in self.replicas)

    def is_full(self) -> bool:
        """Whether the requests in flight and waiting, as far as this gateway knows, reach the limit of the
        definition."""
        limit = self.model.max_concurrent
        if not limit:
            return False
        busy = sum(replica.counter.in_flight for replica in self.replicas) + sum(
            counter.own for counter in self.leaving
        )
        return busy + self.queue.waiting >= limit


class TrafficSplit:
    """Divides the requests of a model between its replicas and those of a revision on trial, by percent.

    The share is exact and evenly spread: at 5 %, every twentieth request. Each part has ranks and prefixes of its own,
    so no cached prefix takes a request to the other part.
    """

    __slots__ = ("_owed", "percent", "stable", "trial")

    def __init__(self, stable: ModelRoute, trial: ModelRoute) -> None:
        self.stable = stable
        self.trial = trial
        self.percent = 0
        self._owed = 0

    @property
    def is_trials_turn(self) -> bool:
        return self._owed + self.percent >= 100

    def advance(self) -> None:
        """A request was sent: the next one's turn."""
        self._owed = (self._owed + self.percent) % 100


def find_leaving(before: ModelRoute, now: ModelRoute) -> tuple[SlotCounter, ...]:
    """The counters of replicas that the new view no longer has. Their requests in flight still count."""
    here = {id(replica.counter) for replica in now.replicas}
    known = (*before.leaving, *(replica.counter for replica in before.replicas))
    return tuple(counter for counter in known if counter.own and id(counter) not in here)


def ingress_target(url: str, node_id: str) -> Target | None:
    """None: the node has reported no address. With TLS the certificate names the node's id, whatever the address."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:  # one bad address must not hide the other nodes
        return None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return None
    if parts.scheme == "https":
        return Target(host=parts.hostname, port=port or 443, tls=True, server_name=node_id)
    return Target(host=parts.hostname, port=port or 80)


def _target_of(node: ViewNode, local_sockets: LocalSockets | None) -> Target | None:
    target = ingress_target(node.ingress_url, node.id)
    return target if target is None or local_sockets is None else local_sockets.add_to(target, node.id)


def place_replicas(
    view: FleetView,
    model_routes: dict[str, ModelRoute],
    in_flight: InFlight,
    controller: Target | None = None,
    local_sockets: LocalSockets | None = None,
) -> None:
    """Give each model its replicas of the view, with the counters they had before. `controller`: the target for nodes
    without an ingress of their own."""
    nodes = {
        node.id: (node, controller if node.via_controller else _target_of(node, local_sockets)) for node in view.nodes
    }
    found: dict[str, list[ReplicaTarget]] = {name: [] for name in model_routes}
    for seen in view.replicas:
        node, target = nodes.get(seen.node_id, (None, None))
        model_route = model_routes.get(seen.model)
        # A process of another revision never gets requests, whatever the view contains.
        if node is None or target is None or model_route is None or not _may_answer(model_route.model, seen.revision):
            continue
        continues = seen.continues if model_route.model.resume_streams else None
        counter = in_flight.counter(seen.process_id, seen.node_id)
        found[seen.model].append(ReplicaTarget(seen, node, target, counter, continues))
    for name, model_route in model_routes.items():
        _set_replicas(model_route, found[name])
    in_flight.retain({replica.seen.process_id for replicas in found.values() for replica in replicas})


def _may_answer(model: ViewModel, revision: str) -> bool:
    return not model.revision or revision == model.revision or (bool(revision) and revision == model.trial_revision)


def _set_replicas(model_route: ModelRoute, replicas: Iterable[ReplicaTarget]) -> None:
    model_route.replicas = tuple(replicas)
    model_route.index_by_process = _by_process(model_route.replicas)
    model = model_route.model
    on_trial = [each for each in model_route.replicas if model.trial_revision == each.seen.revision != model.revision]
    stable = [each for each in model_route.replicas if each not in on_trial]
    if on_trial and stable:
        split = model_route.split = model_route.split or _new_split(model_route)
        split.percent = min(100, max(0, model.trial_percent))
        _attach(split.stable, stable)
        _attach(split.trial, on_trial)
    else:  # one part alone serves all requests
        model_route.split = None
        _attach(model_route, model_route.replicas)


def _new_split(model_route: ModelRoute) -> TrafficSplit:
    model, policy, queue = model_route.model, model_route.policy, model_route.queue
    return TrafficSplit(
        ModelRoute(model, policy, queue, model_route.prefixes, turn=model_route.turn),
        ModelRoute(model, policy, queue, model_route.prefixes.emptied()),
    )


def _attach(model_route: ModelRoute, replicas: Sequence[ReplicaTarget]) -> None:
    model_route.replicas = tuple(replicas)
    model_route.ranks = [0] * len(model_route.replicas)
    model_route.index_by_process = _by_process(model_route.replicas)
    for index, replica in enumerate(model_route.replicas):
        seen = replica.seen
        replica.counter.attach(
            model_route.ranks, index, slots=max(1, seen.slots), last_resort=seen.last_resort, queue=model_route.queue
        )
    model_route.prefixes.retain(set(model_route.index_by_process))


def _by_process(replicas: Sequence[ReplicaTarget]) -> dict[str, int]:
    return {replica.seen.process_id: index for index, replica in enumerate(replicas)}
