"""Uploads as operations: seen, cancelled, continued, and found out when their sender is gone; with two controllers."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from corral.blobs.disk import DiskSpace
from corral.blobs.store import BlobStore
from corral.blobs.upload import Uploads
from corral.cli.models import upload as cli_upload
from corral.client import Client, Endpoint
from corral.contract.admin import OperationView
from corral.contract.installs import LocalFile, OpenUpload
from corral.controller.files.upload_operations import UploadOperations
from corral.kit.errors import Conflict, Gone, Invalid, NotFound
from tests.support.backend_api import Api, open_api
from tests.support.upload_operations import upload_operations_of
from tests.support.waiting import until

DATA = os.urandom(300_000)
FILE = LocalFile("x.gguf", len(DATA), hashlib.sha256(DATA).hexdigest())
COMMAND = "corral models install ./x.gguf"
REQUEST = OpenUpload("x.gguf", (FILE,), command=COMMAND, host="attic")


class Site:
    """Controllers with an upload folder each, and one client of each."""

    def __init__(self, api: Api, folder: Path, stack: AsyncExitStack) -> None:
        self.api = api
        self.clients: list[Client] = []
        self.blobs: list[BlobStore] = []
        self.operations: list[UploadOperations] = []
        self._folder = folder
        self._stack = stack
        self._tasks: list[asyncio.Task[None]] = []

    async def serve(self, at: int = 0, *, silent_s: float = 20.0, kept_s: float = 3600.0, limit: int = 10**6) -> None:
        """Also again, as after a restart: what was in memory is gone, what is on the disk is there."""
        controller = self.api.fleet.controllers[at]
        blobs = BlobStore(self._folder / f"blobs-{at}")
        uploads = Uploads(blobs, DiskSpace(reserve_bytes=0), max_bytes=limit)
        operations = upload_operations_of(controller, silent_s=silent_s, kept_s=kept_s, alive_s=silent_s / 2)
        url = await self.api.serve(controller, uploads=uploads, upload_operations=operations)
        self.clients.append(await self._stack.enter_async_context(Client(Endpoint(url, self.api.admin))))
        self.blobs.append(blobs)
        self.operations.append(operations)
        self._tasks.append(asyncio.create_task(operations.run(), name=f"uploads {len(self._tasks)}"))

    async def kill(self, at: int) -> None:
        self._tasks[at].cancel()
        await asyncio.gather(self._tasks[at], return_exceptions=True)

    async def close(self) -> None:
        for at in range(len(self._tasks)):
            await self.kill(at)

    async def view(self, operation: str, on: int = 0) -> OperationView:
        return await self.clients[on].operations.get(operation)

    async def put(self, operation: str, begin: int, end: int, on: int = 0) -> None:
        await self.clients[on].uploads.append(FILE.sha256, begin, len(DATA), DATA[begin:end], operation=operation)

    async def until_state(self, operation: str, state: str, on: int = 0) -> OperationView:
        async def reached() -> bool:
            return (await self.view(operation, on)).state == state

        await until(reached, f"the operation is {state}")
        return await self.view(operation, on)


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    async with open_api(tmp_path) as api, AsyncExitStack() as stack:
        made = Site(api, tmp_path, stack)
        stack.push_async_callback(made.close)
        yield made


def write(folder: Path) -> tuple[Path, LocalFile]:
    path = folder / FILE.name
    path.write_bytes(DATA)
    return path, FILE


async def test_an_upload_is_an_operation_until_the_last_byte(site: Site) -> None:
    await site.serve()
    opened = await site.clients[0].uploads.open(REQUEST)
    assert (opened.received_bytes, opened.total_bytes) == (0, len(DATA))
    [view] = await site.clients[0].operations.list()
    assert (view.kind, view.backend, view.scope, view.created_by) == ("upload", "x.gguf", "controller", "boss")
    assert (view.state, view.cancellable, view.is_backend) == ("under_way", True, False)
    assert view.message == "files are uploaded to the controller"
    await site.put(opened.operation_id, 0, 100_000)

    async def shown() -> bool:
        row = (await site.view(opened.operation_id)).nodes[0]
        return row.current_bytes == 100_000 and row.rate > 0 and row.eta_s > 0

    await until(shown, "the bytes, the rate and the time that is left")
    row = (await site.view(opened.operation_id)).nodes[0]
    assert (row.node_id, row.file_name, row.phase, row.total_bytes) == ("controller", "x.gguf", "uploading", len(DATA))
    await site.put(opened.operation_id, 100_000, len(DATA))
    done = await site.view(opened.operation_id)
    assert (done.state, done.outcome, done.progress) == ("done", "completed", 100)
    [record] = await site.clients[0].operations.history()
    assert (record.kind, record.name, record.outcome) == ("upload", "x.gguf", "completed")
    again = await site.clients[0].uploads.open(REQUEST)
    assert (again.operation_id, again.received_bytes) == ("", len(DATA)), "nothing is left to do: no operation"


async def test_the_same_content_continues_the_same_operation(site: Site) -> None:
    await site.serve()
    first = await site.clients[0].uploads.open(REQUEST)
    await site.put(first.operation_id, 0, 50_000)
    renamed = OpenUpload("y.gguf", (LocalFile("y.gguf", FILE.size_bytes, FILE.sha256),))
    second = await site.clients[0].uploads.open(renamed)
    assert (second.operation_id, second.received_bytes) == (first.operation_id, 50_000)
    other = await site.clients[0].uploads.open(OpenUpload("z", (LocalFile("z", 5, "ab" * 32),)))
    assert other.operation_id != first.operation_id


async def test_a_cancel_from_elsewhere_stops_the_sender(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cancel goes to a controller that does not receive the pieces."""
    await site.api.fleet.controller("c2")
    await site.serve(0)
    await site.serve(1)
    client, sent = site.clients[0], asyncio.Event()
    monkeypatch.setattr(cli_upload, "FIRST_PIECE_BYTES", 10_000)
    monkeypatch.setattr(cli_upload, "next_piece_bytes", lambda size, _took: size)
    append, going = client.uploads.append, asyncio.Event()

    async def slow(sha256: str, offset: int, size: int, data: bytes, *, operation: str = "") -> object:
        found = await append(sha256, offset, size, data, operation=operation)
        if offset >= 50_000:
            sent.set()
            await going.wait()
        return found

    monkeypatch.setattr(client.uploads, "append", slow)
    sending = asyncio.create_task(cli_upload.upload_files(client, [write(tmp_path)], COMMAND))
    await sent.wait()
    [view] = await site.clients[1].operations.list()
    await site.clients[1].operations.cancel(view.job_id)

    async def forgotten() -> bool:
        return view.job_id not in site.operations[0]._transfers

    await until(forgotten, "the receiving controller knows")
    going.set()
    with pytest.raises(Gone, match=rf"operation {view.job_id[:8]} was cancelled; to go on after all, run the same"):
        await sending
    ended = await site.view(view.job_id)
    assert (ended.outcome, ended.nodes[0].status) == ("cancelled", "cancelled")
    monkeypatch.setattr(client.uploads, "append", append)
    await cli_upload.upload_files(client, [write(tmp_path)], COMMAND)
    assert [each.outcome for each in await client.operations.history()] == ["completed", "cancelled"]
    assert site.blobs[0].get(f"sha256:{FILE.sha256}").path.read_bytes() == DATA


async def test_a_sender_that_is_gone_is_noticed_and_can_continue(site: Site) -> None:
    await site.serve(silent_s=1.0)
    opened = await site.clients[0].uploads.open(REQUEST)
    await site.put(opened.operation_id, 0, 102_400)
    view = await site.until_state(opened.operation_id, "waiting")
    step = f"run the same command again on attic, it continues at 100.0 KiB: `{COMMAND}`"
    assert view.message == f"the sender stopped at 100.0 KiB of 293.0 KiB: {step}"
    assert view.settled
    with pytest.raises(Invalid, match=f"only the sender has the file, so the controller cannot retry alone: {step}"):
        await site.clients[0].operations.retry(opened.operation_id)
    again = await site.clients[0].uploads.open(REQUEST)
    assert (again.operation_id, again.received_bytes) == (opened.operation_id, 102_400)
    assert (await site.view(opened.operation_id)).state == "under_way"
    await site.put(opened.operation_id, 102_400, len(DATA))
    assert (await site.view(opened.operation_id)).outcome == "completed"


async def test_what_nobody_continues_ends(site: Site) -> None:
    await site.serve(silent_s=0.5, kept_s=1.0)
    opened = await site.clients[0].uploads.open(REQUEST)
    view = await site.until_state(opened.operation_id, "done")
    assert (view.outcome, view.nodes[0].status) == ("cancelled", "withdrawn")
    assert view.nodes[0].error == "nobody continued it for 1s"


async def test_a_killed_controller_is_noticed_by_the_other(site: Site) -> None:
    await site.api.fleet.controller("c2")
    await site.serve(0, silent_s=1.5)
    await site.serve(1, silent_s=1.5)
    opened = await site.clients[0].uploads.open(REQUEST)
    await site.put(opened.operation_id, 0, 100_000)
    await site.api.fleet.controllers[0].kill()
    await site.kill(0)
    view = await site.until_state(opened.operation_id, "waiting", on=1)
    assert "the sender stopped at" in view.message
    # The same sender finds the other controller, which has none of the bytes, and begins again, in the same operation.
    with pytest.raises(Conflict, match="open it again"):
        await site.put(opened.operation_id, 100_000, len(DATA), on=1)
    again = await site.clients[1].uploads.open(REQUEST)
    assert (again.operation_id, again.received_bytes) == (opened.operation_id, 0)
    await site.put(opened.operation_id, 0, len(DATA), on=1)
    assert (await site.view(opened.operation_id, on=1)).outcome == "completed"


async def test_a_restarted_controller_continues_at_the_same_byte(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await site.serve()
    client = site.clients[0]
    monkeypatch.setattr(cli_upload, "FIRST_PIECE_BYTES", 100_000)
    monkeypatch.setattr(cli_upload, "next_piece_bytes", lambda size, _took: size)
    append, offsets = client.uploads.append, []

    async def forgetful(sha256: str, offset: int, size: int, data: bytes, *, operation: str = "") -> object:
        offsets.append(offset)
        if len(offsets) == 2:
            site.operations[0]._transfers.clear()  # a new process has its disk and its database, and no memory
        return await append(sha256, offset, size, data, operation=operation)

    monkeypatch.setattr(client.uploads, "append", forgetful)
    await cli_upload.upload_files(client, [write(tmp_path)], COMMAND)
    assert offsets == [0, 100_000, 100_000, 200_000]
    assert [each.outcome for each in await client.operations.history()] == ["completed"]


async def test_an_error_that_stops_the_sender_is_the_reason(site: Site) -> None:
    await site.serve(limit=1000)
    opened = await site.clients[0].uploads.open(REQUEST)
    with pytest.raises(Invalid, match="--upload-limit-bytes"):
        await site.put(opened.operation_id, 0, 500)
    view = await site.view(opened.operation_id)
    assert view.state == "failing"
    assert "--upload-limit-bytes" in view.error
    assert view.error.endswith(f"then run the same command again on attic, it continues at 0 B: `{COMMAND}`")
    assert view.message == "failing; not tried again by itself"


async def test_a_controller_without_operations_of_uploads_still_takes_files(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await site.serve()
    client = site.clients[0]

    async def unknown(_request: OpenUpload) -> object:
        raise NotFound("there is no /api/uploads here")

    monkeypatch.setattr(client.uploads, "open", unknown)
    await cli_upload.upload_files(client, [write(tmp_path)], COMMAND)
    assert site.blobs[0].get(f"sha256:{FILE.sha256}").path.read_bytes() == DATA
    assert await client.operations.history() == ()


REFUSED = [
    OpenUpload("x"),
    OpenUpload("", (FILE,)),
    OpenUpload("x\ny", (FILE,)),
    OpenUpload("x", (FILE,), command="y" * 501),
    OpenUpload("x", (LocalFile("x", 0, FILE.sha256),)),
    OpenUpload("x", (LocalFile("x", 5, "../../etc"),)),
]


async def test_what_cannot_be_an_upload_is_refused(site: Site) -> None:
    await site.serve()
    for request in REFUSED:
        with pytest.raises(Invalid):
            await site.clients[0].uploads.open(request)
    assert await site.clients[0].operations.list() == ()


@pytest.mark.parametrize(
    ("size", "took_s", "after"),
    [(1 << 20, 0.01, 2 << 20), (8 << 20, 0.1, 8 << 20), (1 << 20, 10.0, 256 << 10), (1 << 20, 2.0, 512 << 10)],
)
def test_pieces_take_about_a_second(size: int, took_s: float, after: int) -> None:
    assert cli_upload.next_piece_bytes(size, took_s) == after
