"""The HTTP/1.1 byte relay that gateway and ingress share: parsing, pools, backpressure, timeouts. It knows nothing of
models."""

from corral.relay.limits import Counters, Limits, PoolLimits, Timeouts
from corral.relay.pool import UpstreamPool
from corral.relay.server import RelayServer

__all__ = ["Counters", "Limits", "PoolLimits", "RelayServer", "Timeouts", "UpstreamPool"]
