"""From the settings to what serves LocalAI workers, where somebody wants that."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from corral.controller.localai.needs import PeerNeeds
from corral.controller.orders.replica_calls import ReplicaCalls
from corral.controller.replicas.reconcile import LEASE
from corral.controller.settings import ControllerSettings

if TYPE_CHECKING:
    from corral.controller.localai.setup import Peers


@contextlib.asynccontextmanager
async def open_localai(settings: ControllerSettings, needs: PeerNeeds, instance: str) -> AsyncIterator[Peers | None]:
    """None where nobody asked for it: what it takes is then not even imported, for gRPC is large."""
    if not settings.compat_localai:
        yield None
        return
    from corral.controller.localai.calls import PeerTimes
    from corral.controller.localai.setup import PeerSettings, open_peers

    own = ReplicaCalls(
        needs.bus, needs.clock, accept_s=settings.backend_accept_timeout_s, keep_list=needs.files.keep_list
    )
    told = PeerSettings(
        token=settings.registration_token,
        folder=settings.data.expanduser() / "requests",
        instance=f"{instance}/{uuid.uuid4().hex[:8]}",
        lease=LEASE,
        check_every_s=settings.peer_check_interval_s,
        times=PeerTimes(install_s=settings.backend_install_timeout_s),
    )
    async with open_peers(own, needs, told) as peers:
        yield peers
