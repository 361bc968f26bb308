"""PostgreSQL killed with -9 in mid-operation: it costs time, nothing is ordered twice, nothing is forgotten."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Iterator

import psutil
import pytest

from corral.kit.errors import CorralError
from tests.support.backend_fleet import Fleet, open_fleet
from tests.support.postgres import Postgres
from tests.support.scripted_worker import CorralWorker
from tests.support.waiting import until


@pytest.fixture
def database(postgres: Postgres, postgres_url: str) -> Iterator[Postgres]:
    """Up again afterwards, whatever the test did, and before anybody tidies up in it."""
    yield postgres
    postgres.stop()
    postgres.start()


def kill_9(server: Postgres) -> None:
    """All of it at once, as a machine that loses power: nobody is told, nothing is written down."""
    family = psutil.Process(server.pid).children(recursive=True)
    server.stop(signal.SIGKILL)
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):  # they end by themselves when the first is gone
            process.kill()
    psutil.wait_procs(family, timeout=30)


async def done(fleet: Fleet, operation: str) -> bool:
    try:
        return (await fleet.view(operation)).state == "done"
    except CorralError:  # a connection from before
        return False


@pytest.mark.parametrize("moment", ["under way", "as it ends"])
@pytest.mark.parametrize("kind", ["install", "delete"])
async def test_the_database_killed_with_9_in_mid_operation(
    database: Postgres, postgres_url: str, kind: str, moment: str
) -> None:
    async with open_fleet(postgres_url) as fleet:
        barn, stall = await fleet.corral("barn"), await fleet.corral("stall")
        if kind == "delete":
            await fleet.until(await fleet.install(), "done")
        hold = barn.script.hold = stall.script.hold = asyncio.Event()
        operation = await fleet.ask(kind, "vllm")
        await until(lambda: barn.at_once and stall.at_once)
        if moment == "as it ends":
            hold.set()
        kill_9(database)
        hold.set()
        await until(lambda: _ended(barn, operation) and _ended(stall, operation))
        database.start()
        for worker in (barn, stall):
            await worker.beat()
        await until(lambda: done(fleet, operation))
        for worker in (barn, stall):
            assert bool(worker.installed) == (kind == "install")
            assert [what for what, op, _ in worker.carried_out if op == operation] == [kind]


def _ended(worker: CorralWorker, operation: str) -> bool:
    return any(op == operation for op, _ in worker.outcomes)
