"""Requests under way: reported to the controller while somebody looks at them, the oldest ones
(docs/reference/wire/internal.md#requests-under-way).

Requests of the fast path are found at their connections when a report is made, so they pay nothing. The general path
enters its own in a dict.
"""

from __future__ import annotations

import asyncio
import heapq
import secrets
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol, cast

from corral.contract.http import Request, Tap
from corral.contract.models import LONGEST_NAME
from corral.contract.receipts import MAX_RUNNING, RunningReport, RunningRequest
from corral.gateway.receipts.buffer import ReceiptTemplate
from corral.gateway.receipts.usage import UsageTap
from corral.gateway.routing.replicas import ReplicaTarget
from corral.gateway.view.controller_link import ControllerLink
from corral.gateway.view.fleet import Client
from corral.kit.clock import Clock
from corral.kit.errors import CorralError
from corral.kit.log import get_log
from corral.relay.fast_path import RunningForward

log = get_log(__name__)
_EVERY_S = 2.0
_LONGEST_WANTED_S = 60.0
_LONGEST_TEXT = 200


class Outcome(Protocol):
    """What the general path knows of a request."""

    client: Client
    model: str
    started: float
    replica: ReplicaTarget | None
    tap: UsageTap


class _GeneralRequest(NamedTuple):
    request: Request
    outcome: Outcome
    started: float  # monotonic


class RunningRequests:
    """Those of one process."""

    def __init__(self) -> None:
        self._general: dict[int, _GeneralRequest] = {}

    def begin(self, request: Request, outcome: Outcome) -> None:
        self._general[id(outcome)] = _GeneralRequest(request, outcome, outcome.started)

    def end(self, outcome: Outcome) -> None:
        self._general.pop(id(outcome), None)

    def list_oldest(
        self, fast: Iterable[RunningForward], wall_minus_monotonic: float
    ) -> tuple[tuple[RunningRequest, ...], int]:
        """The oldest ones, and the number of all."""
        found: list[RunningForward | _GeneralRequest] = [*fast, *self._general.values()]
        oldest = heapq.nsmallest(MAX_RUNNING, found, key=lambda each: each.started)
        return tuple(_describe(each, each.started + wall_minus_monotonic) for each in oldest), len(found)


class RunningReporter:
    def __init__(
        self, link: ControllerLink, clock: Clock, server_now: Callable[[], float], running: RunningRequests
    ) -> None:
        self._link = link
        self._clock = clock
        self._server_now = server_now
        self._running = running
        self._fast: Callable[[], Iterable[RunningForward]] = tuple
        self._gateway = secrets.token_hex(8)
        self._wanted_until = 0.0
        self._wanted = asyncio.Event()

    def use(self, fast: Callable[[], Iterable[RunningForward]]) -> None:
        """`fast`: the requests on the fast path now."""
        self._fast = fast

    def on_wanted(self, for_s: float) -> None:
        self._wanted_until = self._clock.monotonic() + min(for_s, _LONGEST_WANTED_S)
        self._wanted.set()

    async def run(self) -> None:
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            while self._clock.monotonic() < self._wanted_until:
                await self._send()
                await self._clock.sleep(_EVERY_S)

    async def _send(self) -> None:
        offset_s = self._server_now() - self._clock.monotonic()
        requests, total = self._running.list_oldest(self._fast(), offset_s)
        try:
            await self._link.send_running(RunningReport(self._gateway, requests, total))
        except CorralError as error:  # the next one is due in 2 s
            log.debug("cannot report the requests under way", reason=error.message)
        except Exception:
            log.exception("reporting the requests under way failed")


def _describe(running: RunningForward | _GeneralRequest, at: float) -> RunningRequest:
    if isinstance(running, _GeneralRequest):
        request, outcome = running.request, running.outcome
        request_id, client, model, path = request.request_id, outcome.client, outcome.model, request.route
        replica, tap = outcome.replica, cast(Tap | None, outcome.tap)
    else:
        tag = running.forward.tag
        assert isinstance(tag, ReceiptTemplate)
        request_id, client, model, path = (
            running.request_id.decode("latin-1"),
            tag.client,
            tag.route.requested_model,
            tag.path,
        )
        replica, tap = tag.route.replica, running.tap
    seen = None if replica is None else replica.seen
    return RunningRequest(
        id=request_id[:_LONGEST_TEXT],
        at=at,
        key_id=client.key_id,
        model=model[:LONGEST_NAME],
        path=path[:_LONGEST_TEXT].decode("latin-1"),
        served_by="" if seen is None or seen.model == model else seen.model,
        node_id="" if seen is None else seen.node_id,
        process_id="" if seen is None else seen.process_id,
        replica=0 if seen is None else seen.replica,
        tokens=tap.events if isinstance(tap, UsageTap) and tap.streamed else 0,
    )
