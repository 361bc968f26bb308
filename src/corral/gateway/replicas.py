"""Replicas and models as the router wants them: prepared when the view changes, only looked up per request."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from urllib.parse import quote, urlsplit

from corral.contract.http import Target
from corral.contract.view import FleetView, ViewModel, ViewNode, ViewReplica
from corral.gateway.inflight import InFlight, Load
from corral.gateway.pick import Policy
from corral.gateway.prefixes import PrefixIndex
from corral.gateway.queue import FairQueue

_MOST_ROUTES = 64
_MODEL_IN_QUERY = re.compile(rb"([?&]model=)[^&]*")
_NO_LOAD = Load()


class Replica:
    """One process that may be asked."""

    __slots__ = ("load", "node_name", "routes", "seen", "target", "token", "under")

    def __init__(self, seen: ViewReplica, node: ViewNode, target: Target, load: Load) -> None:
        self.seen = seen
        self.node_name = node.name
        self.target = target
        self.token = node.ingress_token.encode()
        self.under = f"/replicas/{quote(seen.process_id, safe='')}".encode()  # the path there, before the client's own
        self.load = load
        self.routes: dict[bytes, Route] = {}

    def route(self, path: bytes, asked: str) -> Route:
        """To a path of the replica's. Those of the model's own name are remembered."""
        if asked != self.seen.model:
            return self.route_as(path, asked)
        route = self.routes.get(path)
        if route is None:
            if len(self.routes) >= _MOST_ROUTES:
                self.routes.clear()
            route = self.routes[path] = Route(self.target, self.under + path, self.token, self, asked)
        return route

    def route_as(self, path: bytes, asked: str, *, stand_in: bool = False) -> Route:
        """For a request that names another model: an alias of this one, or the one for which it stands in."""
        if b"?" in path:
            own = quote(self.seen.model, safe="").encode()
            path = _MODEL_IN_QUERY.sub(lambda found: found[1] + own, path)
        return Route(self.target, self.under + path, self.token, self, asked, stand_in=stand_in)


class Route:
    """Where a request goes: which worker's ingress, under which path there, and what opens it. It comes with a slot of
    the replica taken: whoever has it calls `load.end` once."""

    __slots__ = ("asked", "ingress_token", "load", "path", "replica", "stand_in", "target")

    def __init__(
        self,
        target: Target,
        path: bytes,
        ingress_token: bytes,
        replica: Replica | None = None,
        asked: str = "",
        *,
        stand_in: bool = False,
    ) -> None:
        self.target = target
        self.path = path
        self.ingress_token = ingress_token
        self.replica = replica
        self.load = _NO_LOAD if replica is None else replica.load
        self.asked = asked  # the model, in the client's words
        self.stand_in = stand_in  # it answers while the one that was asked for is loading


class ModelQueue(FairQueue[object]):
    """Of one model. What waiters get is a replica with a slot taken, or why there will be none."""

    def __init__(self, on_freed: Callable[[], None]) -> None:
        super().__init__()
        self.freed = on_freed
        self.warm_at: float | None = None  # since when it has had replicas; None: it is cold


@dataclass(slots=True)
class Way:
    """To one model, by its own name."""

    model: ViewModel
    policy: Policy
    queue: ModelQueue
    prefixes: PrefixIndex
    replicas: tuple[Replica, ...] = ()
    ranks: list[int] = field(default_factory=list)  # kept by each replica's Load
    places: dict[str, int] = field(default_factory=dict)  # process → place
    turn: int = 0
    leaving: tuple[Load, ...] = ()  # of replicas that are gone from the view, with requests of ours under way

    def is_full(self) -> bool:
        """As many are under way, or wait, as its definition allows, as far as this gateway knows."""
        most = self.model.max_concurrent
        if not most:
            return False
        busy = sum(replica.load.in_flight for replica in self.replicas) + sum(load.own for load in self.leaving)
        return busy + self.queue.waiting >= most


def leaving_of(before: Way, now: Way) -> tuple[Load, ...]:
    """What is under way at replicas that the new view does not have still counts, until it ends."""
    here = {id(replica.load) for replica in now.replicas}
    known = (*before.leaving, *(replica.load for replica in before.replicas))
    return tuple(load for load in known if load.own and id(load) not in here)


def ingress_target(url: str, node_id: str) -> Target | None:
    """None: nobody has said where it is. Over TLS the certificate is for the node's id, whatever the address."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:  # one node's address must not keep the others from being seen
        return None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return None
    if parts.scheme == "https":
        return Target(host=parts.hostname, port=port or 443, tls=True, server_name=node_id)
    return Target(host=parts.hostname, port=port or 80)


def place_replicas(
    view: FleetView, ways: dict[str, Way], in_flight: InFlight, controller: Target | None = None
) -> None:
    """Give each model its replicas of the present view, with the loads they had before. `controller`: where processes
    are asked whose nodes have no ingress of their own."""
    nodes = {
        node.id: (node, controller if node.via_controller else ingress_target(node.ingress_url, node.id))
        for node in view.nodes
    }
    found: dict[str, list[Replica]] = {name: [] for name in ways}
    for seen in view.replicas:
        node, target = nodes.get(seen.node_id, (None, None))
        way = ways.get(seen.model)
        # A process of another revision is never asked, whatever the view says of it.
        if (
            node is None
            or target is None
            or way is None
            or (way.model.revision and seen.revision != way.model.revision)
        ):
            continue
        found[seen.model].append(Replica(seen, node, target, in_flight.load(seen.process_id, seen.node_id)))
    for name, way in ways.items():
        _place(way, found[name])
    in_flight.keep({replica.seen.process_id for replicas in found.values() for replica in replicas})


def _place(way: Way, replicas: Iterable[Replica]) -> None:
    way.replicas = tuple(replicas)
    way.ranks = [0] * len(way.replicas)
    way.places = {replica.seen.process_id: place for place, replica in enumerate(way.replicas)}
    for place, replica in enumerate(way.replicas):
        seen = replica.seen
        replica.load.place(way.ranks, place, slots=max(1, seen.slots), last_resort=seen.last_resort, queue=way.queue)
    way.prefixes.keep(set(way.places))
