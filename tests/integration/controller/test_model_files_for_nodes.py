"""How nodes get files of models from controllers."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest

from corral.blobs.serving.server import ServingLimits
from corral.blobs.transfer.fetcher import FetchLimits
from corral.bus.api import Tokens
from corral.bus.local import LocalHub
from corral.contract.access import Scope
from corral.contract.codec import decode
from corral.contract.messages.replicas import START_REPLICA, ReplicaFile, ReplicaReply, StartReplica
from corral.controller.files.blob_listener import ControllerBlobUrls, open_blob_listener
from corral.controller.files.missing_blobs import MissingBlobs
from corral.controller.files.model_files import ModelFiles
from corral.controller.orders.observations import OrderAccepted
from corral.controller.orders.order import OrderId
from corral.controller.orders.replica_calls import ReplicaCalls
from corral.controller.settings.models import FileSettings
from corral.kit.clock import SystemClock
from corral.kit.errors import NotFound
from corral.kit.settings import BadSettings
from corral.kit.tasks import background
from corral.store.tables import controllers
from corral.worker.files.fleet_blobs import FleetBlobs
from corral.worker.files.model_files import WorkerFiles
from tests.support.model_file_site import DIGEST, WEIGHTS, Site, listed, site
from tests.support.processes import free_port

__all__ = ["site"]  # a fixture

PATIENT = FetchLimits(tries=1000, first_wait_s=0.01, cap_wait_s=0.1)


@asynccontextmanager
async def door(site: Site, files: ModelFiles) -> AsyncIterator[str]:
    missing = MissingBlobs(files.refetch)
    public = site.tokens.public_key
    limits = ServingLimits(busy_retry_s=0)
    async with (
        open_blob_listener(
            FileSettings(blob_port=0),
            site.blobs,
            public,
            SystemClock(),
            site.active,
            is_expected=missing.is_expected,
            limits=limits,
        ) as url,
        background(missing.run()),
    ):
        yield url


async def test_a_file_that_was_lost_is_brought_back_when_it_is_asked_for(site: Site) -> None:
    definition = await site.install(**listed(("w", site.server.put("/w", WEIGHTS, etag='"1"'))))
    files = site.files()
    (file,) = await files.ensure(definition)
    site.blobs.discard(DIGEST)
    (site.folder / "worker").mkdir()
    async with door(site, files) as url:
        worker = WorkerFiles(site.folder / "worker", FleetBlobs(site.session), SystemClock(), limits=PATIENT)
        _, token = files.sources_for("node-1")
        await worker.ensure([file], [url], token)
        assert (site.folder / "worker" / file.path).read_bytes() == WEIGHTS
        with pytest.raises(NotFound):
            await worker.ensure([ReplicaFile("x", "sha256:" + "0" * 64, 1)], [url], token)


async def test_nodes_are_sent_to_those_who_have_the_files(site: Site) -> None:
    definition = await site.install(**listed(("w", site.server.put("/w", WEIGHTS, etag='"1"'))))
    files = site.files()
    async with site.store.write() as tx:
        for name, url in (("a", "http://own"), ("b", "http://b"), ("c", ""), ("d", "http://b")):
            await controllers.seen(tx, name, host="h", version="1", blob_url=url)
    blob_urls = ControllerBlobUrls(site.store, SystemClock(), own="http://own", live_for_s=60.0, every_s=1.0)
    await blob_urls.run_once()
    site.blob_urls = blob_urls
    files = site.files()
    absent = (ReplicaFile("w", DIGEST, len(WEIGHTS)),)
    assert files.sources_for("n", absent)[0] == ("http://b", "http://own")
    assert files.sources_for("n", await files.ensure(definition))[0] == ("http://own", "http://b")


async def test_a_worker_fetches_them_with_the_token_of_its_order(site: Site) -> None:
    definition = await site.install(**listed(("w", site.server.put("/w", WEIGHTS, etag='"1"'))))
    files = site.files()
    got = await files.ensure(definition)
    async with door(site, files) as url:
        worker = WorkerFiles(site.folder / "worker", FleetBlobs(site.session), SystemClock())
        (site.folder / "worker").mkdir()
        _, token = files.sources_for("node-1")
        await worker.ensure(got, [url], token)
        assert (site.folder / "worker" / got[0].path).read_bytes() == WEIGHTS
        for shown in ("", "Bearer x", f"Bearer {token}x", f"Basic {token}"):
            async with site.session.get(f"{url}/blobs/{DIGEST}", headers={"Authorization": shown}) as answer:
                assert answer.status == 401
        other = site.tokens.sign("gateway", [Scope.REPLICAS])
        async with site.session.get(f"{url}/blobs/{DIGEST}", headers={"Authorization": f"Bearer {other}"}) as answer:
            assert answer.status == 403
        late = site.tokens.sign("node-1", [Scope.BLOBS], aud="controllers", life_s=-1)
        async with site.session.get(f"{url}/blobs/{DIGEST}", headers={"Authorization": f"Bearer {late}"}) as answer:
            assert answer.status == 401


async def test_an_order_with_thousands_of_files_fits_into_a_message(site: Site) -> None:
    files, clock = site.files(), SystemClock()
    many = tuple(ReplicaFile(f"m/1/{'x' * 100}/{number}", DIGEST, 1) for number in range(8000))
    hub = LocalHub(clock)
    controller, worker = hub.join("controller"), hub.join("worker")
    heard: list[StartReplica] = []

    async def start(order: StartReplica, _tokens: Tokens) -> ReplicaReply:
        heard.append(order)
        return ReplicaReply(success=True, accepted=True)

    await worker.serve(START_REPLICA, start, node="barn")
    calls = ReplicaCalls(controller, clock, keep_list=files.keep_list)
    for ordered in (many, many[:3]):
        order = StartReplica(op_id="o", attempt=1, process_id="p", model="m", replica=0, backend="b", files=ordered)
        assert await calls.start("barn", order) == OrderAccepted(OrderId("barn", "o", 1))
    long, short = heard
    assert (long.files, short.files, short.file_list) == ((), many[:3], "")
    found = files.find(long.file_list)
    assert found is not None
    assert decode(tuple[ReplicaFile, ...], found.read_bytes()) == many
    await controller.close()
    await worker.close()


async def test_a_port_that_somebody_else_was_quicker_to_take(site: Site) -> None:
    def door(*, moves: bool) -> AbstractAsyncContextManager[str]:
        told = FileSettings(blob_port=port, blob_url="http://{host}:{port}", blob_port_moves=moves)
        public = site.tokens.public_key
        return open_blob_listener(
            told, site.blobs, public, SystemClock(), site.active, is_expected=lambda _digest: False
        )

    port = free_port()  # nobody else's a moment later
    with socket.create_server(("127.0.0.1", port)):
        with pytest.raises(BadSettings, match=f"--blob-port: 127.0.0.1:{port} cannot be used"):
            async with door(moves=False):
                pass
        async with door(moves=True) as url:
            assert url.startswith("http://{host}:")
            assert int(url.rpartition(":")[2]) not in (0, port)
    async with door(moves=True) as url:
        assert url == f"http://{{host}}:{port}"
