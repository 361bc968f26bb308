"""Whatever fails and whenever, the invariants hold after every commit, and in the end the world is as the rules say."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.simulation.simulation import Broken, simulate
from tests.simulation.trouble import chaos


def test_nothing_is_lost_and_all_comes_to_rest(seed: int, template: Path, request: pytest.FixtureRequest) -> None:
    try:
        simulate(seed, template, chaos=chaos, verbose=request.config.getoption("verbose") > 1)
    except Broken as error:
        pytest.fail(f"seed {seed}: {error}\n\nreplay: scripts/test simulation --seed {seed}", pytrace=False)
