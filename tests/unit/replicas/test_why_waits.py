"""How long an explanation waits for builds that are being looked up."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, cast

import pytest

from corral.controller.install.planner import BUILD_WAIT_S
from corral.controller.replicas.snapshot import FleetSnapshot
from corral.controller.replicas.why import PlacementExplainer
from corral.controller.scheduler.world import Policy
from tests.support.manual_clock import ManualClock
from tests.support.scheduling import NOON


class SlowLookups:
    """Stands for the snapshots of a controller that has just started."""

    def __init__(self, clock: ManualClock, lookup_s: float) -> None:
        self._clock = clock
        self._known_at_s = clock.monotonic() + lookup_s
        self.builds = self

    async def read(self, *, all_models: bool, backends: Collection[str]) -> FleetSnapshot:
        assert all_models
        assert backends
        return FleetSnapshot(NOON)

    def is_looking_up(self, _backend: str) -> bool:
        return self._clock.monotonic() < self._known_at_s


@pytest.mark.parametrize(
    ("lookup_s", "wait_s", "waited_s"),
    [(0.0, None, 0.0), (60.0, None, 3.0), (8.0, BUILD_WAIT_S, 8.0), (60.0, BUILD_WAIT_S, BUILD_WAIT_S)],
)
async def test_an_install_waits_longer_for_builds_than_a_list(
    lookup_s: float, wait_s: float | None, waited_s: float
) -> None:
    clock = ManualClock()
    explainer = PlacementExplainer(cast(Any, SlowLookups(clock, lookup_s)), cast(Any, None), Policy(), clock)
    began_s = clock.monotonic()
    await explainer.world(["llama-cpp"], wait_s=wait_s)
    assert clock.monotonic() - began_s == pytest.approx(waited_s, abs=0.2)
