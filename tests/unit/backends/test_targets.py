"""A build that could not be found out is tried again for as long as somebody needs it, and no longer."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from corral.controller.backends.catalogue import MachineKind
from corral.controller.backends.targets import TargetResolver
from corral.controller.backends.world import TargetKey
from corral.kit.errors import Unavailable
from corral.store.records import BackendRequest
from tests.support.manual_clock import ManualClock

KEY, OTHER = TargetKey("one", MachineKind("default")), TargetKey("two", MachineKind("default"))


async def test_what_nobody_needs_any_more_is_not_due_for_ever() -> None:
    """It was: and the reconciler looked ten times a second, for nothing (found by the simulation, seed 1030)."""

    async def away(*_: object) -> None:
        raise Unavailable("the gallery does not answer")

    clock, catalogue = ManualClock(), SimpleNamespace(resolve=away)
    store: Any = None
    targets = TargetResolver(store, catalogue, clock, on_found=lambda: None)
    async with targets:
        targets.look_up({KEY: BackendRequest("vllm"), OTHER: BackendRequest("piper")}, whole=True)
        for _ in range(5):
            await asyncio.sleep(0)
        wait_s = targets.next_try_s()
        assert wait_s is not None
        assert wait_s > 0
        clock.advance(3600)
        assert targets.next_try_s() == 0.0
        targets.look_up({}, whole=False)  # a look at some nodes says nothing of the others
        assert targets.next_try_s() == 0.0
        targets.look_up({}, whole=True)
        assert targets.next_try_s() is None
