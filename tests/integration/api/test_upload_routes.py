"""`/api/uploads` and `/api/model-plans` from outside, and the command that uses them."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from corral.blobs.disk import DiskSpace
from corral.blobs.store import BlobStore
from corral.blobs.transfer.remote import open_session
from corral.blobs.upload import Uploads
from corral.cli.models import upload as cli_upload
from corral.client import Client, Endpoint
from corral.contract.installs import LocalFile
from corral.controller.files.hubs.hub import HubSettings
from corral.controller.install.planner import InstallPlanner
from corral.kit.errors import Denied, Failed, Invalid, NoCapacity, Unreachable
from tests.support.backend_api import Api, EmptyFleet
from tests.support.gguf_files import LLAMA, TOKENS, gguf
from tests.support.hub import FakeHub, Repository
from tests.support.upload_operations import upload_operations_of

DATA = os.urandom(100_000)
SHA256 = hashlib.sha256(DATA).hexdigest()
URL = f"/api/uploads/{SHA256}"
COMMAND = "corral models install x.gguf"


@pytest.fixture
def blobs(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path / "blobs")


@pytest.fixture
async def served(api: Api, blobs: BlobStore) -> Api:
    uploads = Uploads(blobs, DiskSpace(reserve_bytes=0), max_bytes=1_000_000)
    await api.serve(api.fleet.first, uploads=uploads, upload_operations=upload_operations_of(api.fleet.first))
    return api


async def put(api: Api, offset: int, data: bytes, *, size: int = len(DATA), url: str = URL, key: str = "") -> int:
    answer = await api.call("PUT", f"{url}?offset={offset}&size={size}", raw=data, key=key, on=-1)
    return answer.status


async def test_a_file_in_pieces(served: Api, blobs: BlobStore) -> None:
    before = await served.call("GET", URL, on=-1)
    assert before.json == {"sha256": SHA256, "received_bytes": 0, "complete": False}
    first = await served.call("PUT", f"{URL}?offset=0&size={len(DATA)}", raw=DATA[:60_000], on=-1)
    assert first.json == {"sha256": SHA256, "received_bytes": 60_000, "size_bytes": len(DATA), "complete": False}
    assert await put(served, 0, DATA[:60_000]) == 409
    last = await served.call("PUT", f"{URL}?offset=60000&size={len(DATA)}", raw=DATA[60_000:], on=-1)
    assert (last.status, last.json["complete"]) == (200, True)
    assert blobs.get(f"sha256:{SHA256}").path.read_bytes() == DATA


async def test_only_admins_upload_and_plan(served: Api) -> None:
    assert await put(served, 0, DATA, key=served.viewer) == 403
    assert await put(served, 0, DATA, key="nobody") == 401
    for method in ("GET", "DELETE"):
        assert (await served.call(method, URL, key=served.viewer, on=-1)).status == 403
    plan = await served.call("POST", "/api/model-plans", {"source": "hf://o/r"}, key=served.viewer, on=-1)
    assert plan.status == 403


async def test_an_install_from_a_source_is_one_call(api: Api) -> None:
    async with FakeHub() as hub:
        hub.repositories["org/Tiny-GGUF"] = Repository({"tiny-Q4_0.gguf": gguf(LLAMA | TOKENS) + b"\0" * 5000})
        async with open_session() as session:
            planner = InstallPlanner(session, HubSettings(hub.url), EmptyFleet())
            await api.serve(api.fleet.controllers[0], planner=planner)
            made = await api.post("/api/models", {"source": "hf://org/Tiny-GGUF", "name": "mine"}, on=-1)
            again = await api.post("/api/models", {"source": "hf://org/Tiny-GGUF", "name": "mine"}, on=-1)
    assert (made.status, again.json["changed"]) == (201, False), made.raw
    shown = (await api.get("/api/models/mine", on=-1)).json
    assert shown["source"] == "hf://org/Tiny-GGUF@c0ffee" + "0" * 34 + ":Q4_0"
    assert shown["definition"]["download_files"][0]["filename"] == "tiny-Q4_0.gguf"


async def test_what_cannot_be_is_refused(served: Api, blobs: BlobStore) -> None:
    assert await put(served, 0, b"") == 400
    assert await put(served, -1, DATA) == 400
    assert await put(served, 0, DATA, size=0) == 400
    assert await put(served, 0, DATA, size=2_000_000) == 400
    assert await put(served, 0, DATA, size=10) == 400
    for name in ("..", "%2e%2e%2fetc", "A" * 64, "ab", f"{SHA256}%2f.."):
        assert await put(served, 0, DATA, url=f"/api/uploads/{name}") in (400, 404)
    assert await put(served, 0, b"\0" * len(DATA)) == 400
    assert list((blobs.folder / "incoming").iterdir()) == []
    assert blobs.list_() == []


async def test_a_piece_that_is_too_large_is_not_read(served: Api) -> None:
    assert await put(served, 0, b"\0" * ((32 << 20) + 1), size=64 << 20) == 413


async def test_a_cancelled_upload_leaves_nothing(served: Api, blobs: BlobStore) -> None:
    assert await put(served, 0, DATA[:100]) == 200
    assert (await served.call("DELETE", URL, on=-1)).status == 204
    assert list((blobs.folder / "incoming").iterdir()) == []


def local(tmp_path: Path) -> tuple[Path, LocalFile]:
    path = tmp_path / "x.gguf"
    path.write_bytes(DATA)
    return path, LocalFile(path.name, len(DATA), SHA256)


async def test_the_command_continues_after_a_cut_connection(
    served: Api, blobs: BlobStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli_upload, "FIRST_PIECE_BYTES", 30_000)
    monkeypatch.setattr(cli_upload, "next_piece_bytes", lambda size, _took: size)
    path, file = local(tmp_path)
    async with Client(Endpoint(served.urls[-1], served.admin)) as client:
        append, cuts = client.uploads.append, [False, True, False, True]

        async def flaky(*arguments: object, **more: object) -> object:
            found = await append(*arguments, **more)  # type: ignore[arg-type]
            if cuts and cuts.pop(0):
                raise Unreachable("the connection broke")  # the bytes arrived, the answer did not
            return found

        monkeypatch.setattr(client.uploads, "append", flaky)
        await cli_upload.upload_files(client, [(path, file)], COMMAND)
    assert not cuts
    assert blobs.get(f"sha256:{SHA256}").path.read_bytes() == DATA


async def test_the_command_completes_an_upload_that_has_all_bytes(
    served: Api, blobs: BlobStore, tmp_path: Path
) -> None:
    path, file = local(tmp_path)
    partial = blobs.partial_path(f"upload-{SHA256}")  # as a controller leaves it that was killed while it verified
    partial.write_bytes(DATA)
    async with Client(Endpoint(served.urls[-1], served.admin)) as client:
        await cli_upload.upload_files(client, [(path, file)], COMMAND)
    assert blobs.get(f"sha256:{SHA256}").path.read_bytes() == DATA


async def test_the_command_says_why_it_stops(served: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_upload, "MAX_TRIES", 1)
    path, file = local(tmp_path)
    wrong = LocalFile(file.name, file.size_bytes, "ab" * 32)
    async with Client(Endpoint(served.urls[-1], served.admin)) as client:
        with pytest.raises(Invalid, match="upload it again"):
            await cli_upload.upload_files(client, [(path, wrong)], COMMAND)
        with pytest.raises(Invalid, match="--upload-limit-bytes"):
            await cli_upload.upload_files(client, [(path, LocalFile(file.name, 2_000_000, SHA256))], COMMAND)

        async def cut(*_: object, **_more: object) -> object:
            raise Unreachable("the connection broke")

        monkeypatch.setattr(client.uploads, "append", cut)
        with pytest.raises(Failed, match="run the same command again to continue"):
            await cli_upload.upload_files(client, [(path, file)], COMMAND)
    async with Client(Endpoint(served.urls[-1], served.viewer)) as client:
        with pytest.raises(Denied):
            await cli_upload.upload_files(client, [(path, file)], COMMAND)


async def test_a_full_disk_is_told_at_once(api: Api, blobs: BlobStore, tmp_path: Path) -> None:
    full = DiskSpace(reserve_bytes=0, measure=lambda _folder: 10)
    operations = upload_operations_of(api.fleet.first)
    await api.serve(api.fleet.first, uploads=Uploads(blobs, full), upload_operations=operations)
    path, file = local(tmp_path)
    async with Client(Endpoint(api.urls[-1], api.admin)) as client:
        with pytest.raises(NoCapacity, match="not enough disk for the uploaded file"):
            await cli_upload.upload_files(client, [(path, file)], COMMAND)


def test_parts_of_a_file_are_found(tmp_path: Path) -> None:
    for number in (1, 2):
        (tmp_path / f"x-{number:05d}-of-00002.gguf").write_bytes(b"GGUF")
    found = cli_upload.find_parts(tmp_path / "x-00002-of-00002.gguf")
    assert [path.name for path in found] == ["x-00001-of-00002.gguf", "x-00002-of-00002.gguf"]
    (tmp_path / "x-00001-of-00002.gguf").unlink()
    with pytest.raises(Invalid, match=r"there is no file .*x-00001-of-00002.gguf on this machine"):
        cli_upload.find_parts(tmp_path / "x-00002-of-00002.gguf")
    (tmp_path / "empty.gguf").touch()
    with pytest.raises(Invalid, match="is empty"):
        cli_upload.find_parts(tmp_path / "empty.gguf")


@pytest.mark.parametrize(
    ("text", "is_local"),
    [
        ("./x.gguf", True),
        ("x.GGUF", True),
        ("/data/x.gguf", True),
        ("~/x.gguf", True),
        ("smollm2-135m", False),
        ("localai@qwen3-4b", False),
        ("hf://o/r/x.gguf", False),
        ("https://h/x.gguf", False),
    ],
)
def test_what_names_a_file_of_this_machine(text: str, is_local: bool) -> None:
    assert cli_upload.is_local_path(text) is is_local
