from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from corral.controller.replicas.load_jobs import Cooldown
from tests.support.both_stores import KINDS, on_kind, postgres, postgres_url
from tests.support.replica_fleet import QUICK, ReplicaFleet, open_replica_fleet
from tests.support.sqlite import sqlite_url

__all__ = ["fleet", "local", "patient", "patient_fleet", "postgres", "postgres_url"]

# Where it matters what was said a moment ago, or that something is not tried again yet: a moment is longer than this
# process ever stands still.
PATIENT = replace(
    QUICK,
    cooldown=Cooldown(first=timedelta(seconds=3), longest=timedelta(seconds=3)),
    fresh_s=2.0,
)


@pytest.fixture(params=KINDS)
async def fleet(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[ReplicaFleet]:
    """One controller, no node yet."""
    async with on_kind(request, tmp_path, open_replica_fleet) as opened:
        yield opened


@pytest.fixture
async def local(tmp_path: Path) -> AsyncIterator[ReplicaFleet]:
    async with open_replica_fleet(sqlite_url(tmp_path)) as opened:
        yield opened


@pytest.fixture(params=KINDS)
async def patient_fleet(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[ReplicaFleet]:
    async with on_kind(request, tmp_path, open_replica_fleet, pace=PATIENT) as opened:
        yield opened


@pytest.fixture
async def patient(tmp_path: Path) -> AsyncIterator[ReplicaFleet]:
    async with open_replica_fleet(sqlite_url(tmp_path), pace=PATIENT) as opened:
        yield opened
