"""The only module of the controller that imports `controller/localai` and `api/localai`: without these two packages the
controller serves Corral workers and clients (`tests/compat/test_without_localai.py`)."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING

from litestar import Controller

from corral.controller.backends.catalogue import Catalogue
from corral.controller.files.model_files import ModelFiles
from corral.controller.orders.replica_calls import ReplicaCalls
from corral.controller.replicas.reconcile import LEASE
from corral.controller.settings import ControllerSettings
from corral.controller.wiring.access import Trust
from corral.controller.wiring.runtime import Runtime

if TYPE_CHECKING:
    from corral.controller.localai.setup import Peers


@contextlib.asynccontextmanager
async def open_localai(
    settings: ControllerSettings,
    runtime: Runtime,
    trust: Trust,
    catalogue: Catalogue,
    files: ModelFiles,
    on_unreachable: Callable[[str], Awaitable[None]],
) -> AsyncIterator[Peers | None]:
    """None where LocalAI workers may not join: `controller/localai` is not imported then, for gRPC is large."""
    if not settings.localai.compat_localai:
        yield None
        return
    from corral.controller.localai.calls import PeerTimes
    from corral.controller.localai.needs import PeerDependencies
    from corral.controller.localai.setup import PeerSettings, open_peers

    needs = PeerDependencies(
        runtime.store,
        runtime.bus,
        runtime.leadership,
        runtime.feed,
        runtime.clock,
        catalogue,
        files,
        trust.ingresses,
        trust.ingress_tokens.public_key,
        on_unreachable,
    )
    own = ReplicaCalls(
        runtime.bus, runtime.clock, accept_s=settings.backends.backend_accept_timeout_s, keep_list=files.keep_list
    )
    peer_settings = PeerSettings(
        token=settings.localai.registration_token,
        folder=settings.data.expanduser() / "requests",
        instance=f"{runtime.instance}/{uuid.uuid4().hex[:8]}",
        lease=LEASE,
        storage=settings.storage,
        check_every_s=settings.localai.peer_check_interval_s,
        times=PeerTimes(install_s=settings.backends.backend_install_timeout_s),
    )
    async with open_peers(own, needs, peer_settings) as peers:
        yield peers


def localai_routes() -> tuple[type[Controller], ...]:
    """Routes that only LocalAI's own clients use. Corral's have theirs under `/api`."""
    from corral.controller.api.localai.backends import LocalAIBackendRoutes

    return (LocalAIBackendRoutes,)
