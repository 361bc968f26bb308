"""Hints among controllers and gateways. Losing one costs at most one polling interval."""

from __future__ import annotations

import msgspec

from corral.contract.codec import Message, always
from corral.contract.receipts import RunningReport
from corral.contract.subjects import event


class ViewChanged(Message, frozen=True):
    kind: str = always(str)  # nodes, keys, tokens
    id: str = ""
    row_version: int = 0


VIEW_CHANGED = event("corral.view.changed", ViewChanged)
# What only controllers care about (rules, operations, inventories) changes too often for gateways to be woken by it.
WORK_CHANGED = event("corral.work.changed", ViewChanged)


class PeerLoad(Message, frozen=True):
    """Requests one controller has under way at processes of workers that have no ingress of their own. A later one of
    the same controller is worth more; a process not named has none there."""

    controller: str = always(str)
    seq: int = always(int)
    in_flight: dict[str, int] = msgspec.field(default_factory=lambda: dict[str, int]())


PEER_LOAD = event("corral.peers.load", PeerLoad)


class GatewayDemand(Message, frozen=True):
    """What one gateway told a controller: see `Receipts`. Here for the other controllers."""

    controller: str = always(str)
    gateway: str = always(str)
    waiting: dict[str, int] = msgspec.field(default_factory=lambda: dict[str, int]())
    pressure: dict[str, int] = msgspec.field(default_factory=lambda: dict[str, int]())


GATEWAY_DEMAND = event("corral.gateways.demand", GatewayDemand)


class RunningWanted(Message, frozen=True):
    """Somebody looks at the requests under way: gateways report them every 2 s for so long."""

    for_s: float = always(float)


# Below `corral.view`, to which gateways may subscribe.
RUNNING_WANTED = event("corral.view.running", RunningWanted)


class GatewayRunning(Message, frozen=True):
    """What one process of a gateway reported to a controller. Here for the other controllers."""

    controller: str = always(str)
    report: RunningReport = msgspec.field(default_factory=RunningReport)


GATEWAY_RUNNING = event("corral.gateways.running", GatewayRunning)
