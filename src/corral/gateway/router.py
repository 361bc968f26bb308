"""Where a request for a model goes: to a replica at once where one has a slot free, else after waiting for one.

Warm requests are decided by `route_now` in a microsecond or two: a lookup, a choice among ranks (`pick.py`), a slot
taken (`inflight.py`). All others wait here, in one queue per model, until a slot is free, the model is loaded
(`loads.py`), its load has failed, or their time is up. Sending, retrying and counting are `serving.py`.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from functools import partial

from corral.contract.http import Target
from corral.contract.loads import LoadState, LoadStatus
from corral.contract.view import FleetView, ViewModel, ViewPolicy
from corral.gateway import answers
from corral.gateway.answers import Answer
from corral.gateway.inflight import InFlight
from corral.gateway.loads import Loads
from corral.gateway.near import NearNames
from corral.gateway.pick import BUSY, Picked, Policy, Warm, pick, pick_warm
from corral.gateway.prefixes import BLOCK, PrefixIndex, chain_of
from corral.gateway.queue import Waiter
from corral.gateway.replicas import ModelQueue, Replica, Route, Way, leaving_of, place_replicas
from corral.gateway.v1 import Ask, Waited
from corral.kit.clock import Clock
from corral.kit.errors import CorralError

_USUAL = Policy()
_RETRY_S = 1.0  # for a model at its limit that does not say when to come again: as LocalAI does
_LOOK_S = 5.0  # how often a waiting request looks at which of its budgets counts by now


@dataclass(frozen=True, slots=True)
class RouterOptions:
    load_wait_s: float = 60.0  # 0: for ever
    queue_wait_s: float = 60.0
    queue_limit: int = 1000
    policy: Policy = _USUAL
    prefix_ttl_s: float = 300.0
    prefix_half_life_s: float = 120.0
    retry_after_s: float = 2.0


class ReplicaRouter:
    """Implements `Router` and `PromptRouter`."""

    def __init__(
        self,
        in_flight: InFlight,
        loads: Loads,
        clock: Clock,
        options: RouterOptions,
        look_again: Callable[[], Awaitable[None]],
        *,
        controller: Target | None = None,
    ) -> None:
        """`look_again` brings a view that was read from now on. `controller`: where it is, for nodes without an ingress
        of their own."""
        self._in_flight = in_flight
        self._loads = loads
        self._clock = clock
        self._options = options
        self._look_again = look_again
        self._controller = controller
        self._ways: dict[str, Way] = {}  # by the model's own name
        self._names: dict[str, Way] = {}  # by every name it is asked for
        self._exact: dict[str, Way] = {}  # by names that need no second look: neither alias nor cold
        self._near = NearNames()
        self._nodes_at: dict[Target, set[str]] = {}  # by their ingress
        self.disturbed = 0  # prompts whose replica had too much to do
        self._pressure: Counter[str] = Counter()  # the same by model, since somebody was told

    # The view.

    def took(self, view: FleetView) -> None:
        """A new view: prepare it, and serve whom it lets serve."""
        before = self._ways
        enabled = {model.id: model for model in view.models if not model.disabled}
        self._ways = {name: self._way(model) for name, model in enabled.items() if not model.alias}
        self._names = dict(self._ways)
        for name, model in enabled.items():
            if model.alias in self._ways:  # an alias of an alias is nothing
                self._names[name] = self._ways[model.alias]
        self._near = NearNames(self._names)
        place_replicas(view, self._ways, self._in_flight, self._controller)
        self._nodes_at = self._find_nodes()
        self._loads.keep(self._ways.keys())
        self._exact = {name: way for name, way in self._ways.items() if way.replicas}
        for name, way in before.items():
            if name in self._ways:
                self._ways[name].leaving = leaving_of(way, self._ways[name])
        for name, way in self._ways.items():
            self._settle(name, way)
        for name, way in before.items():
            if name not in self._ways:
                way.queue.serve_all(answers.unknown_model(name, installed=len(self._names)))

    def _find_nodes(self) -> dict[Target, set[str]]:
        found: dict[Target, set[str]] = {}
        for way in self._ways.values():
            for replica in way.replicas:
                if replica.target != self._controller:
                    found.setdefault(replica.target, set()).add(replica.seen.node_id)
        return found

    def _way(self, model: ViewModel) -> Way:
        known = self._ways.get(model.id)
        policy = _policy(model.policy, self._options.policy)
        if known is None:
            options = self._options
            prefixes = PrefixIndex(ttl_s=options.prefix_ttl_s, half_life_s=options.prefix_half_life_s)
            return Way(model, policy, self.new_queue(model.id), prefixes)
        return Way(model, policy, known.queue, known.prefixes, turn=known.turn)

    def new_queue(self, name: str) -> ModelQueue:
        return ModelQueue(partial(self._serve_waiting, name))

    def _settle(self, name: str, way: Way) -> None:
        queue = way.queue
        if not way.replicas:
            queue.warm_at = None
            if queue.waiting:
                self._loads.attend(name, self)
            return
        if queue.warm_at is None:
            queue.warm_at = self._clock.monotonic()
            self._loads.arrived(name)
        self._serve_waiting(name)

    def nodes_at(self, target: Target) -> Collection[str]:
        """The nodes with replicas in the view whose ingress is `target`."""
        return self._nodes_at.get(target, ())

    def waiting(self) -> dict[str, int]:
        return {name: way.queue.waiting for name, way in self._ways.items() if way.queue.waiting}

    def take_pressure(self) -> dict[str, int]:
        """Prompts since the last call that could not go where their beginning is known, by model."""
        taken, self._pressure = dict(self._pressure), Counter()
        return taken

    # Choosing.

    def route_now(self, ask: Ask) -> Route | None:
        model = ask.fields.model
        way = self._exact.get(model)
        if way is None or way.queue.waiting or (way.model.max_concurrent and way.is_full()):  # who waits comes first
            return None
        replicas = way.replicas
        if len(replicas) == 1 and way.ranks[0] < BUSY:
            replica = replicas[0]
            replica.load.begin()
        else:
            chosen = self._choose(way, ask.body)
            if chosen is None:
                return None
            replica = chosen
        path = ask.request.path
        return replica.routes.get(path) or replica.route(path, model)

    def _choose(self, way: Way, body: bytes) -> Replica | None:
        """With a slot of it taken."""
        replicas = way.replicas
        if len(replicas) > 1 and way.policy.prefix_cache and len(body) > BLOCK:
            place = self._choose_warm(way, body)
        else:
            place = pick(way.ranks, way.turn)
        if place is None:
            return None
        way.turn = place + 1
        replica = replicas[place]
        replica.load.begin()
        return replica

    def _choose_warm(self, way: Way, body: bytes) -> int | None:
        chain = chain_of(body)
        if not chain:
            return pick(way.ranks, way.turn)
        now, prefixes, replicas = self._clock.monotonic(), way.prefixes, way.replicas
        match = prefixes.match(chain, way.places, now)
        warm = None if match is None else Warm(way.places[match[0]], match[1] / len(chain))

        def weight(place: int) -> float:
            return prefixes.weight(replicas[place].seen.process_id, now)

        picked: Picked | None = pick_warm(way.ranks, way.turn, way.policy, warm, weight)
        if picked is None:
            return None
        if picked.disturbed:
            self.disturbed += 1
            self._pressure[way.model.id] += 1
        prefixes.observe(chain, replicas[picked.place].seen.process_id, now)
        return picked.place

    def _serve_waiting(self, name: str) -> None:
        way = self._ways.get(name)
        while way is not None and way.queue.waiting:
            replica = self._choose(way, b"")
            if replica is None:
                return
            way.queue.serve(replica)

    # Waiting.

    async def route(self, ask: Ask) -> Route | Answer:
        asked = ask.fields.model
        way = self._names.get(asked)
        if way is None:  # it may have been made a moment ago
            await self._look_again()
            way = self._names.get(asked)
        if way is not None and not way.replicas:
            other = await self._instead(way, ask)
            if other is not None:
                return other
            way = self._names.get(asked)  # the fleet may be another by now
        if way is None:
            return answers.unknown_model(
                asked, installed=len(ask.fleet.models), near=self._near.find(asked, ask.client)
            )
        if way.is_full():
            model = way.model
            return answers.at_limit(model.id, model.max_concurrent, model.retry_after_s or _RETRY_S)
        free = None if way.queue.waiting else self._choose(way, ask.body)
        got = free or await self.wait(way, ask.client.key_id, ask.waited or Waited())
        return got.route(ask.request.path, asked) if isinstance(got, Replica) else got

    async def _instead(self, way: Way, ask: Ask) -> Route | Answer | None:
        """What a request for a cold model gets where its definition says that it need not wait."""
        name, how = way.model.id, way.model.while_loading
        if how == "use":
            return self._stand_in(way, ask)
        if how != "refuse":
            return None
        try:
            status = await self._loads.ask(name)
        except CorralError:
            status = None  # it is asked for again with the next request
        if status is not None and status.state == LoadState.FAILED:
            return answers.load_failed(name, status, before=True)
        return answers.model_loading(name, status, self._options.retry_after_s)

    def _stand_in(self, way: Way, ask: Ask) -> Route | None:
        """At once, whether or not the controller can be asked for the load now; None: it has no slot free."""
        name = way.model.stand_in
        stand_in = self._names.get(name)
        if stand_in is None or stand_in.queue.waiting or stand_in.is_full():
            return None
        if not (ask.client.may_use(name) or ask.client.may_use(stand_in.model.id)):
            return None
        replica = self._choose(stand_in, ask.body)
        if replica is None:
            return None
        self._loads.nudge(way.model.id)
        return replica.route_as(ask.request.path, ask.fields.model, stand_in=True)

    async def wait(self, way: Way, key_id: str, waited: Waited) -> Replica | Answer:
        """For a slot, or for the model to be loaded. `waited` is told how long it took."""
        name, queue = way.model.id, way.queue
        limit = self._options.queue_limit
        if queue.waiting >= limit:
            return answers.queue_full(name, limit, self._options.retry_after_s)
        started, cold = self._clock.monotonic(), not way.replicas
        served: asyncio.Future[Replica | Answer] = asyncio.get_running_loop().create_future()
        waiter: Waiter[object] = queue.add(key_id, partial(_give, served))
        try:
            if cold:
                self._loads.attend(name, self)
            got = await self._first(name, queue, served, started)
        except BaseException:  # the client left, perhaps just when it was served
            given = served.result() if served.done() and not served.cancelled() else None
            if isinstance(given, Replica):
                given.load.end()
            raise
        finally:
            queue.leave(waiter)
            self._note(waited, queue, started, cold=cold)
        return got

    async def _first(
        self, name: str, queue: ModelQueue, served: asyncio.Future[Replica | Answer], started: float
    ) -> Replica | Answer:
        """The slot, or why there is none, or that it took too long."""
        while True:
            left_s = self._left_s(name, queue, started)
            if left_s is not None and left_s <= 0:
                return self._too_long(name)
            await asyncio.wait((served,), timeout=_LOOK_S if left_s is None else min(left_s, _LOOK_S))
            if served.done():
                return served.result()

    def _left_s(self, name: str, queue: ModelQueue, started: float) -> float | None:
        """A cold model has its own budget; from when it is warm, waiting for a slot begins. None: as long as it
        takes."""
        now = self._clock.monotonic()
        way = self._ways.get(name)
        if queue.warm_at is not None:
            return max(started, queue.warm_at) + self._options.queue_wait_s - now
        budget_s = (way.model.load_wait_s if way else 0.0) or self._options.load_wait_s
        return None if not budget_s else started + budget_s - now

    def _too_long(self, name: str) -> Answer:
        way = self._ways.get(name)
        if way is None:
            return answers.unknown_model(name, installed=len(self._names))
        if way.replicas and all(replica.load.is_ejected for replica in way.replicas):
            return answers.unreachable(name, self._options.retry_after_s)
        if way.replicas:
            return answers.all_busy(name, self._options.retry_after_s)
        budget_s = way.model.load_wait_s or self._options.load_wait_s
        return answers.model_loading(name, self._loads.status(name), budget_s)

    def _note(self, waited: Waited, queue: ModelQueue, started: float, *, cold: bool) -> None:
        now = self._clock.monotonic()
        ready = now if queue.warm_at is None else min(now, max(started, queue.warm_at))
        if cold:
            waited.load_s += ready - started
            waited.queue_s += now - ready
        else:
            waited.queue_s += now - started

    # For `Loads`.

    def wants(self, model: str) -> bool:
        way = self._ways.get(model)
        return way is not None and not way.replicas and way.queue.waiting > 0

    def load_failed(self, model: str, status: LoadStatus | None, *, before: bool) -> None:
        way = self._ways.get(model)
        if way is not None:
            gone = answers.unknown_model(model, installed=len(self._names))
            way.queue.serve_all(gone if status is None else answers.load_failed(model, status, before=before))


def _give(served: asyncio.Future[Replica | Answer], what: object) -> None:
    if isinstance(what, Replica | Answer) and not served.done():
        served.set_result(what)
    elif isinstance(what, Replica):
        what.load.end()


def _policy(own: ViewPolicy | None, usual: Policy) -> Policy:
    if own is None:
        return usual
    return Policy(
        own.prefix_cache,
        own.min_match if own.min_match > 0 else usual.min_match,
        own.abs_slack if own.abs_slack > 0 else usual.abs_slack,
        own.rel_factor if own.rel_factor > 0 else usual.rel_factor,
    )
