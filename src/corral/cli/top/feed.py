"""Reads the fleet for `corral top`: nodes and operations from the event stream, the rest every two seconds and only for
the view that shows it. Where the stream cannot be opened, everything is read every two seconds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from typing import TYPE_CHECKING

from corral.cli.top.overview import MAX_REQUESTS_READ
from corral.cli.top.state import FleetState
from corral.client.errors import NO_ANSWER
from corral.contract.receipts import RunningList
from corral.kit.errors import CorralError, NotFound
from corral.kit.tasks import Wake

if TYPE_CHECKING:
    from corral.client import Client

POLL_S = 2.0
CLUSTER_S = 10.0  # sentences about the fleet: the controller reads every node for them
_READS = {  # what each view shows besides nodes and operations
    "overview": ("models", "requests"),
    "models": ("models",),
    "requests": ("requests",),
    "logs": ("models",),
}


async def read_fleet(client: Client) -> FleetState:
    """Everything once. Raises the fleet's errors."""
    me = await client.me()
    fleet = FleetState(
        url=client.endpoint.url, context=client.endpoint.context or "", key_name=me.name or me.key_id, role=me.role
    )
    await asyncio.gather(
        _read_nodes(client, fleet),
        _read_models(client, fleet),
        _read_requests(client, fleet),
        _read_cluster(client, fleet),
    )
    return fleet


class FleetFeed:
    def __init__(
        self, client: Client, fleet: FleetState, *, view: Callable[[], str], on_change: Callable[[], None]
    ) -> None:
        """`view`: the one that is shown now."""
        self._client = client
        self._fleet = fleet
        self._view = view
        self._on_change = on_change
        self._wake = Wake()
        self._cluster_at = asyncio.get_running_loop().time()

    def wake(self) -> None:
        """Another view is shown, or a change was requested: read now."""
        self._wake.set()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow(), name="following events")
            tasks.create_task(self._poll(), name="polling")

    async def _follow(self) -> None:
        try:
            async with aclosing(self._client.follow(reached=True)) as events:
                async for event in events:
                    self._fleet.apply(event)
                    self._on_change()
        except CorralError:  # no such stream, or too many; `_poll` reads nodes and operations instead
            self._fleet.live = False

    async def _poll(self) -> None:
        while True:
            await self._wake.wait(POLL_S)
            try:
                await self._read()
            except NO_ANSWER as error:
                self._fleet.problem = f"{error.message}; retrying"
            except CorralError as error:
                self._fleet.problem = error.message
            else:
                self._fleet.problem = ""
            self._on_change()

    async def _read(self) -> None:
        reads = _READS.get(self._view(), ())
        if not self._fleet.live:
            await _read_nodes(self._client, self._fleet)
        if "models" in reads:
            await _read_models(self._client, self._fleet)
        if "requests" in reads:
            await _read_requests(self._client, self._fleet)
        now = asyncio.get_running_loop().time()
        if self._view() == "overview" and now - self._cluster_at >= CLUSTER_S:
            self._cluster_at = now
            await _read_cluster(self._client, self._fleet)


async def _read_nodes(client: Client, fleet: FleetState) -> None:
    nodes, operations = await asyncio.gather(client.nodes.list(), client.operations.list(rows=False))
    if not fleet.live:  # otherwise the event stream has newer views
        fleet.nodes.replace({node.id: node for node in nodes})
        fleet.operations.replace({view.job_id: view for view in operations})


async def _read_models(client: Client, fleet: FleetState) -> None:
    fleet.models, fleet.replicas = await asyncio.gather(client.models.list(), client.loads.replicas())


async def _read_requests(client: Client, fleet: FleetState) -> None:
    found, fleet.requests = await asyncio.gather(_read_running(client), client.requests.list(limit=MAX_REQUESTS_READ))
    fleet.running, fleet.running_total = found.requests, found.total


async def _read_running(client: Client) -> RunningList:
    try:
        return await client.requests.running()
    except NotFound:  # a controller of the release before the one that lists them
        return RunningList()


async def _read_cluster(client: Client, fleet: FleetState) -> None:
    fleet.attention = (await client.cluster()).attention
