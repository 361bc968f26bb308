"""Whatever peers send and whoever is killed: a file counts only when its hash is right, and staged files arrive."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from tests.simulation.simulation import Broken
from tests.simulation.transfers import simulate_transfers

MEMORY = Path("/dev/shm")  # no disk waits there for a file to be synced


def test_every_staged_file_arrives_and_only_right_ones_count(transfer_seed: int) -> None:
    try:
        with tempfile.TemporaryDirectory(prefix="corral-sim-", dir=MEMORY if MEMORY.is_dir() else None) as folder:
            simulate_transfers(transfer_seed, Path(folder))
    except Broken as error:
        pytest.fail(f"seed {transfer_seed}: {error}\n\nreplay: pytest {__file__} --seed {transfer_seed}", pytrace=False)
