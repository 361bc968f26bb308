"""How many seeds, and a database with the schema that every seed begins with a copy of."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.simulation.simulation import Broken, simulate
from tests.simulation.trouble import chaos
from tests.support.sqlite import sqlite_template

SEEDS = int(os.environ.get("SIMULATION_SEEDS", "100"))


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("simulation")
    group.addoption("--seeds", type=int, default=SEEDS, help="how many runs of the simulation")
    group.addoption("--first-seed", type=int, default=0, help="the seed to begin with")
    group.addoption("--seed", type=int, default=None, help="just this one, to see it again")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        # The options are known only where this folder is named on the command line.
        chosen = metafunc.config.getoption("--seed", default=None)
        first = metafunc.config.getoption("--first-seed", default=0)
        how_many = metafunc.config.getoption("--seeds", default=SEEDS)
        seeds = range(first, first + how_many) if chosen is None else [chosen]
        metafunc.parametrize("seed", [seed for seed in seeds if seed % 2 == metafunc.module.EVERY_OTHER])
    if "transfer_seed" in metafunc.fixturenames:
        chosen = metafunc.config.getoption("--seed", default=None)
        first = metafunc.config.getoption("--first-seed", default=0)
        how_many = metafunc.config.getoption("--seeds", default=SEEDS) // 4  # each has its own five machines
        metafunc.parametrize("transfer_seed", range(first, first + how_many) if chosen is None else [chosen])


@pytest.fixture
def survives(template: Path, request: pytest.FixtureRequest) -> Callable[[int], None]:
    def check(seed: int) -> None:
        try:
            simulate(seed, template, chaos=chaos, verbose=request.config.getoption("verbose") > 1)
        except Broken as error:
            pytest.fail(f"seed {seed}: {error}\n\nreplay: scripts/test simulation --seed {seed}", pytrace=False)

    return check


@pytest.fixture(scope="session")
def template() -> Path:
    return sqlite_template()
