"""Routes a request for a model to a replica: at once where a replica has a free slot, else after a wait.

`route_now` takes a microsecond or two: a lookup, a choice among ranks (`pick.py`), a slot (`in_flight.py`). Other
requests wait here, in one queue per model, until a slot is free, the model is loaded (`load_watcher.py`), its load has
failed, or the wait time ends. `http/forward.py` sends, retries and counts.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Collection
from functools import partial

from corral.contract.http import Target
from corral.contract.loads import LoadState, LoadStatus
from corral.contract.view import FleetView, ViewModel, ViewPolicy
from corral.gateway import responses
from corral.gateway.responses import Response
from corral.gateway.routing.in_flight import InFlight
from corral.gateway.routing.load_watcher import LoadWatcher
from corral.gateway.routing.local_sockets import LocalSockets
from corral.gateway.routing.pick import BUSY, LAST_RESORT, Picked, Policy, PrefixMatch, pick, pick_by_prefix
from corral.gateway.routing.prefixes import BLOCK, PrefixIndex, hash_blocks
from corral.gateway.routing.queue import Waiter
from corral.gateway.routing.replicas import (
    ModelQueue,
    ModelRoute,
    ReplicaTarget,
    Route,
    TrafficSplit,
    find_leaving,
    place_replicas,
)
from corral.gateway.routing.request import RouteRequest, WaitTimes
from corral.gateway.routing.settings import RoutingSettings
from corral.gateway.routing.suggestions import ModelSuggestions
from corral.kit.clock import Clock
from corral.kit.errors import CorralError

_RETRY_S = 1.0  # for a model at its limit without a Retry-After of its own: as in LocalAI
_CHECK_S = 5.0  # how often a waiting request checks which of its wait times applies


class ReplicaRouter:
    """Implements `Router` and `ImmediateRouter`, and `LoadWaiters` for the load watcher."""

    def __init__(
        self,
        in_flight: InFlight,
        loads: LoadWatcher,
        clock: Clock,
        settings: RoutingSettings,
        refresh: Callable[[], Awaitable[None]],
        *,
        controller: Target | None = None,
        local_sockets: LocalSockets | None = None,
    ) -> None:
        """`refresh` waits for a view that is read from now on. `controller`: the target for nodes without an ingress of
        their own. `local_sockets`: of workers on this machine."""
        self._in_flight = in_flight
        self._loads = loads
        self._clock = clock
        self._settings = settings
        self._policy = Policy(prefix_cache=settings.prefix_cache)
        self._refresh = refresh
        self._controller = controller
        self._local_sockets = local_sockets
        self._model_routes: dict[str, ModelRoute] = {}  # by the model's own name
        self._by_name: dict[str, ModelRoute] = {}  # by name and alias
        # By own name, models with replicas only: those whose requests may take the fast path. A model whose streams are
        # resumed is not here: the fast path neither knows nor checks it.
        self._ready: dict[str, ModelRoute] = {}
        self._suggestions = ModelSuggestions()
        self._nodes_at: dict[Target, set[str]] = {}  # by their ingress
        self.prefix_misses = 0  # prompts whose matching replica was too busy
        self._pressure: Counter[str] = Counter()  # the same by model, since the last `take_pressure`

    # The view.

    def apply_view(self, view: FleetView) -> None:
        """Prepare a new view, and serve the waiting requests that it has replicas for."""
        before = self._model_routes
        enabled = {model.id: model for model in view.models if not model.disabled}
        self._model_routes = {name: self._new_model_route(model) for name, model in enabled.items() if not model.alias}
        self._by_name = dict(self._model_routes)
        for name, model in enabled.items():
            if model.alias in self._model_routes:  # an alias of an alias is not resolved
                self._by_name[name] = self._model_routes[model.alias]
        self._suggestions = ModelSuggestions(self._by_name)
        place_replicas(view, self._model_routes, self._in_flight, self._controller, self._local_sockets)
        self._nodes_at = self._find_nodes()
        self._loads.retain(self._model_routes.keys())
        self._ready = {
            name: model_route
            for name, model_route in self._model_routes.items()
            if model_route.replicas and not model_route.resumes_streams
        }
        for name, model_route in before.items():
            if name in self._model_routes:
                self._model_routes[name].leaving = find_leaving(model_route, self._model_routes[name])
        for name, model_route in self._model_routes.items():
            self._on_view(name, model_route)
        for name, model_route in before.items():
            if name not in self._model_routes:
                model_route.queue.serve_all(responses.unknown_model(name, installed=len(self._by_name)))

    def _find_nodes(self) -> dict[Target, set[str]]:
        found: dict[Target, set[str]] = {}
        for model_route in self._model_routes.values():
            for replica in model_route.replicas:
                if replica.target != self._controller:
                    found.setdefault(replica.target, set()).add(replica.seen.node_id)
        return found

    def _new_model_route(self, model: ViewModel) -> ModelRoute:
        known = self._model_routes.get(model.id)
        policy = _policy(model.policy, self._policy)
        if known is None:
            settings = self._settings
            prefixes = PrefixIndex(ttl_s=settings.prefix_cache_ttl_s, half_life_s=settings.prefix_half_life_s)
            return ModelRoute(model, policy, self.new_queue(model.id), prefixes)
        split = known.split if known.model.trial_revision == model.trial_revision else None
        prefixes = known.prefixes
        if known.split is not None and model.revision == known.model.trial_revision:  # promoted: its caches count
            prefixes = known.split.trial.prefixes
        return ModelRoute(model, policy, known.queue, prefixes, turn=known.turn, split=split)

    def new_queue(self, name: str) -> ModelQueue:
        return ModelQueue(partial(self._serve_waiting, name))

    def _on_view(self, name: str, model_route: ModelRoute) -> None:
        queue = model_route.queue
        if not model_route.replicas:
            queue.ready_at = None
            if queue.waiting:
                self._loads.watch(name, self)
            return
        if queue.ready_at is None:
            queue.ready_at = self._clock.monotonic()
            self._loads.on_ready(name)
        self._serve_waiting(name)

    def nodes_at(self, target: Target) -> Collection[str]:
        """The nodes with replicas in the view whose ingress is `target`."""
        return self._nodes_at.get(target, ())

    def waiting(self) -> dict[str, int]:
        return {
            name: model_route.queue.waiting
            for name, model_route in self._model_routes.items()
            if model_route.queue.waiting
        }

    def take_pressure(self) -> dict[str, int]:
        """Prefix misses since the last call, by model."""
        taken, self._pressure = dict(self._pressure), Counter()
        return taken

    # Choosing.

    def route_now(self, request: RouteRequest) -> Route | None:
        model = request.model
        model_route = self._ready.get(model)
        if (
            model_route is None
            or model_route.queue.waiting
            or (model_route.model.max_concurrent and model_route.is_full())
        ):  # waiting requests come first
            return None
        replicas = model_route.replicas
        if len(replicas) == 1 and model_route.ranks[0] < BUSY:
            replica = replicas[0]
            replica.counter.begin()
        else:
            chosen = self._choose(model_route, request.body)
            if chosen is None:
                return None
            replica = chosen
        path = request.request.path
        return replica.routes.get(path) or replica.route(path, model)

    def _choose(self, model_route: ModelRoute, body: bytes) -> ReplicaTarget | None:
        """Choose a replica and take a slot of it."""
        if model_route.split is not None:
            return self._choose_part(model_route.split, body)
        replicas = model_route.replicas
        if len(replicas) > 1 and model_route.policy.prefix_cache and len(body) > BLOCK:
            index = self._choose_by_prefix(model_route, body)
        else:
            index = pick(model_route.ranks, model_route.turn)
        if index is None:
            return None
        model_route.turn = index + 1
        replica = replicas[index]
        replica.counter.begin()
        return replica

    def _choose_part(self, split: TrafficSplit, body: bytes) -> ReplicaTarget | None:
        """While a revision is on trial: one of its replicas in its turns. A request never waits for it, and it gets
        more than its share only where no other replica can be reached."""
        replica = ReplicaRouter._choose(self, split.trial, body) if split.is_trials_turn else None
        if replica is None:
            replica = ReplicaRouter._choose(self, split.stable, body)
        if replica is None and min(split.stable.ranks) >= LAST_RESORT:
            replica = ReplicaRouter._choose(self, split.trial, body)
        if replica is not None:
            split.advance()
        return replica

    def _choose_by_prefix(self, model_route: ModelRoute, body: bytes) -> int | None:
        blocks = hash_blocks(body)
        if not blocks:
            return pick(model_route.ranks, model_route.turn)
        now, prefixes, replicas = self._clock.monotonic(), model_route.prefixes, model_route.replicas
        found = prefixes.match(blocks, model_route.index_by_process, now)
        match = None if found is None else PrefixMatch(model_route.index_by_process[found[0]], found[1] / len(blocks))

        def weight(index: int) -> float:
            return prefixes.weight(replicas[index].seen.process_id, now)

        picked: Picked | None = pick_by_prefix(model_route.ranks, model_route.turn, model_route.policy, match, weight)
        if picked is None:
            return None
        if picked.is_miss:
            self.prefix_misses += 1
            self._pressure[model_route.model.id] += 1
        prefixes.observe(blocks, replicas[picked.replica_index].seen.process_id, now)
        return picked.replica_index

    def _serve_waiting(self, name: str) -> None:
        model_route = self._model_routes.get(name)
        while model_route is not None and model_route.queue.waiting:
            replica = self._choose(model_route, b"")
            if replica is None:
                return
            model_route.queue.serve(replica)

    # Waiting.

    async def route(self, request: RouteRequest) -> Route | Response:
        name = request.model
        model_route = self._by_name.get(name)
        if model_route is None:  # it may have been created a moment ago
            await self._refresh()
            model_route = self._by_name.get(name)
        if model_route is not None and not model_route.replicas:
            other = await self._while_loading(model_route, request)
            if other is not None:
                return other
            model_route = self._by_name.get(name)  # the view may have changed meanwhile
        if model_route is None:
            return responses.unknown_model(
                name, installed=len(request.fleet.models), suggestions=self._suggestions.find(name, request.client)
            )
        if model_route.is_full():
            model = model_route.model
            return responses.at_limit(model.id, model.max_concurrent, model.retry_after_s or _RETRY_S)
        free = None if model_route.queue.waiting else self._choose(model_route, request.body)
        got = free or await self.wait(model_route, request.client.key_id, request.wait_times or WaitTimes())
        return got.route(request.request.path, name) if isinstance(got, ReplicaTarget) else got

    async def _while_loading(self, model_route: ModelRoute, request: RouteRequest) -> Route | Response | None:
        """The result for a cold model whose definition does not let requests wait; None: the request waits."""
        name, mode = model_route.model.id, model_route.model.while_loading
        if mode == "use":
            return self._stand_in(model_route, request)
        if mode != "refuse":
            return None
        try:
            status = await self._loads.request(name)
        except CorralError:
            status = None  # the next request tries again
        if status is not None and status.state == LoadState.FAILED:
            return responses.load_failed(name, status, failed_before=True)
        return responses.model_loading(name, status, self._settings.retry_after_s)

    def _stand_in(self, model_route: ModelRoute, request: RouteRequest) -> Route | None:
        """A slot of the stand-in model at once, whether or not the load can be requested now; None: it has no free
        slot."""
        name = model_route.model.stand_in
        stand_in = self._by_name.get(name)
        if stand_in is None or stand_in.queue.waiting or stand_in.is_full():
            return None
        if not (request.client.may_use(name) or request.client.may_use(stand_in.model.id)):
            return None
        replica = self._choose(stand_in, request.body)
        if replica is None:
            return None
        self._loads.request_in_background(model_route.model.id)
        return replica.route_as(request.request.path, request.model, is_stand_in=True)

    async def wait(self, model_route: ModelRoute, key_id: str, wait_times: WaitTimes) -> ReplicaTarget | Response:
        """Wait for a slot, or for the load of the model. `wait_times` gets the duration."""
        name, queue = model_route.model.id, model_route.queue
        limit = self._settings.queue_limit
        if queue.waiting >= limit:
            return responses.queue_full(name, limit, self._settings.retry_after_s)
        started, cold = self._clock.monotonic(), not model_route.replicas
        served: asyncio.Future[ReplicaTarget | Response] = asyncio.get_running_loop().create_future()
        waiter: Waiter[object] = queue.add(key_id, partial(_resolve, served))
        try:
            if cold:
                self._loads.watch(name, self)
            got = await self._wait_for(name, queue, served, started)
        except BaseException:  # the client left, perhaps just after it was served
            given = served.result() if served.done() and not served.cancelled() else None
            if isinstance(given, ReplicaTarget):
                given.counter.end()
            raise
        finally:
            queue.remove(waiter)
            self._record(wait_times, queue, started, cold=cold)
        return got

    async def _wait_for(
        self, name: str, queue: ModelQueue, served: asyncio.Future[ReplicaTarget | Response], started: float
    ) -> ReplicaTarget | Response:
        """The slot, or the error to send, also after a timeout."""
        while True:
            left_s = self._left_s(name, queue, started)
            if left_s is not None and left_s <= 0:
                return self._timeout_response(name)
            await asyncio.wait((served,), timeout=_CHECK_S if left_s is None else min(left_s, _CHECK_S))
            if served.done():
                return served.result()

    def _left_s(self, name: str, queue: ModelQueue, started: float) -> float | None:
        """The rest of the wait time: for the load while the model is cold, for a slot since it is ready. None: no
        limit."""
        now = self._clock.monotonic()
        model_route = self._model_routes.get(name)
        if queue.ready_at is not None:
            return max(started, queue.ready_at) + self._settings.queue_wait_s - now
        wait_s = (model_route.model.load_wait_s if model_route else 0.0) or self._settings.load_wait_s
        return None if not wait_s else started + wait_s - now

    def _timeout_response(self, name: str) -> Response:
        model_route = self._model_routes.get(name)
        if model_route is None:
            return responses.unknown_model(name, installed=len(self._by_name))
        if model_route.replicas and all(replica.counter.is_ejected for replica in model_route.replicas):
            return responses.unreachable(name, self._settings.retry_after_s)
        if model_route.replicas:
            return responses.all_busy(name, self._settings.retry_after_s)
        wait_s = model_route.model.load_wait_s or self._settings.load_wait_s
        return responses.model_loading(name, self._loads.status(name), wait_s)

    def _record(self, wait_times: WaitTimes, queue: ModelQueue, started: float, *, cold: bool) -> None:
        now = self._clock.monotonic()
        ready = now if queue.ready_at is None else min(now, max(started, queue.ready_at))
        if cold:
            wait_times.load_s += ready - started
            wait_times.queue_s += now - ready
        else:
            wait_times.queue_s += now - started

    # `LoadWaiters`.

    def is_wanted(self, model: str) -> bool:
        model_route = self._model_routes.get(model)
        return model_route is not None and not model_route.replicas and model_route.queue.waiting > 0

    def on_load_failed(self, model: str, status: LoadStatus | None, *, failed_before: bool) -> None:
        model_route = self._model_routes.get(model)
        if model_route is not None:
            gone = responses.unknown_model(model, installed=len(self._by_name))
            model_route.queue.serve_all(
                gone if status is None else responses.load_failed(model, status, failed_before=failed_before)
            )


def _resolve(served: asyncio.Future[ReplicaTarget | Response], result: object) -> None:
    if isinstance(result, ReplicaTarget | Response) and not served.done():
        served.set_result(result)
    elif isinstance(result, ReplicaTarget):
        result.counter.end()


def _policy(own: ViewPolicy | None, default: Policy) -> Policy:
    if own is None:
        return default
    return Policy(
        own.prefix_cache,
        own.min_match if own.min_match > 0 else default.min_match,
        own.abs_slack if own.abs_slack > 0 else default.abs_slack,
        own.rel_factor if own.rel_factor > 0 else default.rel_factor,
    )
