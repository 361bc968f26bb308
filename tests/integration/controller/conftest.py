from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cluster import Cluster


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One controller with its gateway on SQLite, for a module's worth of requests. Health is slow to judge here:
    nodes made by hand do not heartbeat."""
    root: Path = tmp_path_factory.mktemp("controller")
    cluster = Cluster(
        root,
        f"sqlite:///{root}/corral.db",
        members=1,
        CORRAL_STALE_AFTER="10m",
        CORRAL_COMPAT_LOCALAI="true",
        CORRAL_REGISTRATION_TOKEN="shared-token-of-localai",
        CORRAL_GALLERIES="[]",
    )
    try:
        yield cluster.start()
    finally:
        cluster.close()
