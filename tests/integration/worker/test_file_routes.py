"""The file server of the ingress, byte by byte as LocalAI controllers use it, and where it does better than theirs."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from corral.blobs.disk import DiskSpace
from corral.contract.http import Request, Responder
from corral.controller.localai.file_server import FileServerAddress, FileServers
from corral.kit.clock import SystemClock
from corral.relay import Limits
from corral.worker.localai.file_keys import FileFolders
from corral.worker.localai.file_routes import FileRoutes
from corral.worker.localai.file_sweep import FileSweep
from corral.worker.localai.uploads import Upload
from tests.support.relay import Answer, Client, Rig, quick, rig
from tests.support.waiting import until

LIMIT = 4 << 20
CONTENT = os.urandom(3_000_000)
W = "/v1/files/models/m/w.gguf"


def sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


class Server:
    def __init__(self, r: Rig, root: Path, routes: FileRoutes) -> None:
        self.rig, self.root, self.routes = r, root, routes
        self._client: Client | None = None

    async def call(self, method: str, path: str | bytes, body: bytes | None = None, **headers: str) -> Answer:
        client = await self.rig.client()
        try:
            return await client.ask(make_request(method, path, body, **headers))
        finally:
            client.abort()

    async def put(self, path: str, content: bytes, **headers: str) -> Answer:
        return await self.call("PUT", path, content, **headers)

    async def put_range(self, path: str, content: bytes, start: int, end: int, declared: str = "") -> Answer:
        """Bytes from `start` up to `end`, not included."""
        headers = {"content_range": f"bytes {start}-{end - 1}/{len(content)}"}
        return await self.put(path, content[start:end], **headers, x_content_sha256=declared or sha(content))

    def left(self) -> list[str]:
        """Every file of the server, sidecars and unfinished uploads included."""
        return sorted(str(path.relative_to(self.root)) for path in self.root.rglob("*") if not path.is_dir())


def make_request(method: str, path: str | bytes, body: bytes | None = None, **headers: str) -> bytes:
    raw = path if isinstance(path, bytes) else path.encode()
    lines = [b"%b %b HTTP/1.1" % (method.encode(), raw), b"host: w"]
    lines += [f"{name.replace('_', '-')}: {value}".encode() for name, value in headers.items()]
    if body is not None and "transfer_encoding" not in headers:
        lines.append(b"content-length: %d" % len(body))
    return b"\r\n".join(lines) + b"\r\n\r\n" + (body or b"")


@contextlib.asynccontextmanager
async def serve(root: Path, **more: Any) -> AsyncIterator[Server]:
    options: dict[str, Any] = {"limit_bytes": LIMIT, "space": DiskSpace(0), "busy_s": 10.0} | more
    routes = FileRoutes(FileFolders.beside(root / "models"), **options)

    class Handler:
        async def handle(self, request: Request, responder: Responder) -> None:
            await routes.handle(request, responder)

    (root / "models").mkdir(exist_ok=True)
    async with rig(handler=Handler()) as r:
        yield Server(r, root, routes)


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    async with serve(tmp_path) as server:
        yield server


def path_in(answer: Answer) -> Path:
    assert answer.status == 200, answer
    assert answer.get(b"content-type") == b"application/json"
    return Path(json.loads(answer.body)["local_path"])


@pytest.mark.parametrize("content", [b"", b"x", CONTENT], ids=["empty", "byte", "large"])
async def test_a_whole_upload(server: Server, content: bytes) -> None:
    path = path_in(await server.put(W, content, x_content_sha256=sha(content).upper()))
    assert path == server.root / "models/m/w.gguf"
    assert path.read_bytes() == content
    assert server.left() == ["models/m/w.gguf", "models/m/w.gguf.sha256"]
    head = await server.call("HEAD", W)
    assert head.status == 200
    assert head.get(b"content-length") == head.get(b"x-file-size") == b"%d" % len(content)
    assert head.get(b"x-local-path") == str(path).encode()
    assert head.get(b"accept-ranges") == b"bytes"
    assert head.get(b"x-content-sha256") == sha(content).encode()
    assert head.get(b"x-target-sha256") is None


async def test_a_chunked_upload_without_a_hash(server: Server) -> None:
    body = b"5\r\nhello\r\n4\r\n you\r\n0\r\n\r\n"
    assert path_in(await server.put(W, body, transfer_encoding="chunked")).read_bytes() == b"hello you"


async def test_keys_lead_into_three_folders(server: Server) -> None:
    for key, place in (
        ("models/w", "models/w"),
        ("data/d/x", "data/d/x"),
        ("ephemeral/inputs/12345678/a.wav", "staging/ephemeral/inputs/12345678/a.wav"),
    ):
        assert path_in(await server.put(f"/v1/files/{key}", b"1")) == server.root / place


async def test_names_encoded_and_not(server: Server) -> None:
    name = "models/a b/ü#?%.bin"
    encoded = "/v1/files/models/a%20b/%C3%BC%23%3F%25.bin"
    assert path_in(await server.put(encoded, b"1")) == server.root / name
    assert (await server.call("GET", encoded)).body == b"1"
    assert (await server.call("HEAD", encoded)).get(b"x-local-path") == str(server.root / name).encode()
    plain = "models/a+b,c;d=e@f[1]'~!$&().bin"
    assert path_in(await server.put(f"/v1/files/{plain}", b"2")) == server.root / plain
    assert (await server.call("GET", "/v1/files/models/a%2Bb%2Cc;d=e@f%5B1%5D'~!$&().bin")).body == b"2"
    assert (await server.call("GET", f"/v1/files/{plain}?x=1")).body == b"2"


async def test_a_wrong_hash_changes_nothing(server: Server) -> None:
    await server.put(W, b"good")
    wrong = await server.put(W, b"bad", x_content_sha256=sha(b"good"))
    assert (wrong.status, wrong.body) == (400, f"sha256 mismatch: expected {sha(b'good')} got {sha(b'bad')}\n".encode())
    assert wrong.get(b"content-type") == b"text/plain; charset=utf-8"
    assert (await server.call("GET", W)).body == b"good"
    assert (await server.put(W, b"x", x_content_sha256="zz")).status == 400
    assert server.left() == ["models/m/w.gguf", "models/m/w.gguf.sha256"]


async def test_an_upload_in_ranges(server: Server) -> None:
    first = await server.put_range(W, CONTENT, 0, 1_000_000)
    assert (first.status, first.body) == (308, b"")
    assert first.get(b"range") == b"bytes=0-999999"
    assert first.get(b"x-file-size") == b"1000000"
    assert not (server.root / "models/m/w.gguf").exists(), "a backend must not see half a file"
    head = await server.call("HEAD", W)
    assert (head.status, head.get(b"x-file-size"), head.get(b"content-length")) == (200, b"1000000", b"1000000")
    assert head.get(b"x-target-sha256") == sha(CONTENT).encode()
    assert head.get(b"x-content-sha256") is None
    assert head.get(b"x-local-path") == str(server.root / "models/m/w.gguf").encode()
    assert (await server.call("GET", W)).status == 404
    assert json.loads((await server.call("GET", "/v1/files-list/models/m")).body) == {"files": None}
    for wrong_start in (0, 500_000, 2_000_000):
        wrong = await server.put_range(W, CONTENT, wrong_start, 2_500_000)
        assert (wrong.status, wrong.get(b"x-file-size")) == (416, b"1000000")
        assert wrong.get(b"content-range") == b"bytes */3000000"
    path = path_in(await server.put_range(W, CONTENT, 1_000_000, 3_000_000))
    assert path.read_bytes() == CONTENT
    assert server.left() == ["models/m/w.gguf", "models/m/w.gguf.sha256"]


async def test_a_range_of_another_file(server: Server) -> None:
    await server.put_range(W, CONTENT, 0, 1_000_000)
    other = await server.put_range(W, CONTENT, 1_000_000, 2_000_000, declared=sha(b"other"))
    assert other.status == 409
    assert server.left() == []
    await server.put_range(W, CONTENT, 0, 1_000_000)
    assert path_in(await server.put_range(W, b"other", 0, 5)).read_bytes() == b"other"
    assert server.left() == ["models/m/w.gguf", "models/m/w.gguf.sha256"]


async def test_a_wrong_hash_after_ranges_removes_the_bytes(server: Server) -> None:
    await server.put_range(W, CONTENT, 0, 1_000_000, declared=sha(b"other"))
    wrong = await server.put_range(W, CONTENT, 1_000_000, 3_000_000, declared=sha(b"other"))
    assert wrong.status == 400
    assert wrong.body.startswith(b"sha256 mismatch: expected ")
    assert server.left() == []


async def test_a_cut_connection_is_resumed(server: Server) -> None:
    client = await server.rig.client()
    headers = {"content_range": f"bytes 0-{len(CONTENT) - 1}/{len(CONTENT)}", "x_content_sha256": sha(CONTENT)}
    request = make_request("PUT", W, CONTENT, **headers)
    await client.send(request[:-1_000_000])
    await until(lambda: server.left() and _partial_size(server) > 1_000_000, "bytes on the disk")
    client.abort()

    async def size() -> int:
        return int((await server.call("HEAD", W)).get(b"x-file-size") or 0)

    await until(lambda: _is(size, 2_000_000), "every byte that arrived")
    assert path_in(await server.put_range(W, CONTENT, 2_000_000, 3_000_000)).read_bytes() == CONTENT


async def _is(size: Any, expected: int) -> bool:
    return bool(await size() == expected)


def _partial_size(server: Server) -> int:
    return max(path.stat().st_size for path in server.root.rglob(".corral-upload-*"))


async def test_a_short_body_says_so_and_keeps_its_bytes(server: Server) -> None:
    answer = await server.put(W, CONTENT[:100], content_range="bytes 0-199/300", x_content_sha256=sha(CONTENT[:300]))
    assert (answer.status, answer.body) == (400, b"short body: got 100 expected 200\n")
    assert (await server.call("HEAD", W)).get(b"x-file-size") == b"100"
    long = await server.put(W, CONTENT[:100], content_range="bytes 100-109/300", x_content_sha256=sha(CONTENT[:300]))
    assert long.status == 400
    assert (await server.call("HEAD", W)).get(b"x-file-size") == b"100"


async def test_an_upload_that_was_complete_and_never_confirmed_is_finished(server: Server) -> None:
    upload = Upload(server.root / "models/m/w.gguf")
    upload.open(append=False, target=sha(CONTENT), total=len(CONTENT))
    upload.write([CONTENT])
    upload.close()  # here the worker was killed
    head = await server.call("HEAD", W)
    assert (head.get(b"x-file-size"), head.get(b"x-target-sha256")) == (b"3000000", sha(CONTENT).encode())
    # LocalAI's client begins at 0, and its server would answer 416 until the budget ends.
    assert path_in(await server.put_range(W, CONTENT, 0, len(CONTENT))).read_bytes() == CONTENT
    # And what is there already need not be sent again.
    assert path_in(await server.put_range(W, CONTENT, 0, len(CONTENT))).read_bytes() == CONTENT
    damaged = Upload(server.root / "models/m/v.gguf")
    damaged.open(append=False, target=sha(CONTENT), total=len(CONTENT))
    damaged.write([b"x" * len(CONTENT)])
    damaged.close()
    v = W.replace("w.gguf", "v.gguf")
    assert path_in(await server.put_range(v, CONTENT, 0, len(CONTENT))).read_bytes() == CONTENT


@pytest.mark.parametrize("range_", ["bytes */10", "bytes 0-10/10", "nonsense", "bytes 5-4/10", "bytes 0-9/*"])
async def test_a_range_that_cannot_be_used(server: Server, range_: str) -> None:
    assert (await server.put(W, b"0123456789", content_range=range_)).status == 400
    assert server.left() == []


async def test_the_limit_counts_the_file_not_the_request(server: Server) -> None:
    whole = await server.put(W, b"x" * (LIMIT + 1))
    assert whole.status == 413
    assert b"--upload-limit" in whole.body
    chunk = b"%x\r\n%b\r\n" % (1 << 20, b"x" * (1 << 20))
    chunked = await server.put(W, chunk * 5 + b"0\r\n\r\n", transfer_encoding="chunked")
    assert chunked.status == 413
    ranged = await server.put(W, b"x", content_range=f"bytes 0-0/{LIMIT + 1}")
    assert ranged.status == 413
    assert server.left() == []
    assert (await server.put(W, b"x" * LIMIT)).status == 200


async def test_a_second_upload_of_a_file_waits(server: Server) -> None:
    first, second = await server.rig.client(), await server.rig.client()
    headers = {"content_range": f"bytes 0-{len(CONTENT) - 1}/{len(CONTENT)}", "x_content_sha256": sha(CONTENT)}
    request = make_request("PUT", W, CONTENT, **headers)
    await first.send(request[:-1_000_000])
    await until(lambda: server.left() and _partial_size(server) > 1_000_000, "the first upload")
    sending = asyncio.create_task(second.ask(request))
    await asyncio.wait([sending], timeout=0.2)
    assert not sending.done()
    await first.send(request[-1_000_000:])
    assert path_in(await first.answer()).read_bytes() == CONTENT
    assert path_in(await sending).read_bytes() == CONTENT
    assert server.left() == ["models/m/w.gguf", "models/m/w.gguf.sha256"]


async def test_a_second_upload_that_waited_too_long_is_told_to_try_again(tmp_path: Path) -> None:
    async with serve(tmp_path, busy_s=0.1) as server:
        first = await server.rig.client()
        headers = {"content_range": f"bytes 0-{len(CONTENT) - 1}/{len(CONTENT)}", "x_content_sha256": sha(CONTENT)}
        request = make_request("PUT", W, CONTENT, **headers)
        await first.send(request[:-500_000])
        await until(lambda: server.left() and _partial_size(server) > 1_000_000, "the first upload")
        busy = await server.put_range(W, CONTENT, 0, 3_000_000)
        assert busy.status == 416, "LocalAI's client repeats after this one"
        assert b"another upload of this file is under way" in busy.body
        assert (await server.put(W + "2", b"other files go on")).status == 200
        await first.send(request[-500_000:])
        assert (await first.answer()).status == 200


async def test_an_upload_that_another_process_receives(server: Server) -> None:
    other = Upload(server.root / "models/m/w.gguf")
    other.open(append=False, target=sha(CONTENT), total=len(CONTENT))
    other.write([CONTENT[:1000]])
    for answer in (
        await server.put_range(W, CONTENT, 0, 3_000_000),
        await server.put_range(W, CONTENT, 1000, 3_000_000),
        await server.put(W, CONTENT),
    ):
        assert (answer.status, answer.get(b"x-file-size")) == (416, b"1000")
    other.close()
    assert path_in(await server.put_range(W, CONTENT, 1000, 3_000_000)).read_bytes() == CONTENT


async def test_directories_and_files_that_are_not_there(server: Server) -> None:
    await server.put(W, b"x")
    folder = "/v1/files/models/m"
    assert (await server.call("HEAD", folder)).status == 400
    assert (await server.call("GET", folder)).status == 404
    assert (await server.put(folder, b"x")).status == 400
    assert (await server.put_range(folder, b"x", 0, 1)).status == 400
    assert (await server.put(W + "/below-a-file", b"x")).status == 400
    for method in ("HEAD", "GET"):
        assert (await server.call(method, "/v1/files/models/none")).status == 404
        assert (await server.call(method, W + "/below-a-file")).status in (400, 404)
    assert (await server.call("GET", "/v1/files-list/models/none")).status == 404
    assert (await server.call("GET", "/v1/files-list/models/m/w.gguf")).status == 404
    assert (await server.call("GET", "/v1/files-list/data/none")).status == 404


async def test_methods(server: Server) -> None:
    for method in ("DELETE", "PATCH", "OPTIONS"):
        assert (await server.call(method, W)).status == 405
    assert (await server.call("POST", W, b"")).status == 404
    assert (await server.call("POST", "/v1/files-list/models", b"")).status == 405
    empty = await server.put("/v1/files/", b"x")
    assert (empty.status, empty.body) == (400, b"key is required\n")


@pytest.mark.parametrize(
    ("path", "clean"),
    [
        (b"/v1/files/models/../../etc/passwd", b"/v1/etc/passwd"),
        (b"/v1/files//etc/passwd", b"/v1/files/etc/passwd"),
        (b"/v1/files/%2e%2e/x", b"/v1/x"),
        (b"/v1/files/models/./w%20x", b"/v1/files/models/w%20x"),
        (b"/v1/files-list/models//", b"/v1/files-list/models/"),
    ],
)
async def test_a_path_that_is_not_clean_is_redirected(server: Server, path: bytes, clean: bytes) -> None:
    answer = await server.call("PUT", path, b"x")
    assert (answer.status, answer.get(b"location")) == (301, clean)
    assert server.left() == []


async def test_links_do_not_lead_out(server: Server, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("secret")
    (server.root / "models/out").symlink_to(outside)
    (server.root / "models/file").symlink_to(outside / "secret")
    for key in ("models/out/secret", "models/out/new", "models/file"):
        for method, body in (("GET", None), ("HEAD", None), ("PUT", b"x")):
            answer = await server.call(method, f"/v1/files/{key}", body)
            assert answer.status == 400
            assert method == "HEAD" or b"outside allowed directory" in answer.body
    assert (await server.call("GET", "/v1/files-list/models/out")).status == 400
    assert (outside / "secret").read_text() == "secret"
    assert os.listdir(outside) == ["secret"]


async def test_corrals_own_store_is_out_of_reach(server: Server) -> None:
    (server.root / "models/.blobs").mkdir()
    (server.root / "models/.blobs/12").write_text("blob")
    for method, body in (("GET", None), ("HEAD", None), ("PUT", b"x")):
        assert (await server.call(method, "/v1/files/models/.blobs/12", body)).status == 400
    assert (server.root / "models/.blobs/12").read_text() == "blob"
    assert (await server.put("/v1/files/models/m/.corral-upload-1", b"x")).status == 400


async def test_the_controller_of_corral_is_served_too(server: Server, tmp_path: Path) -> None:
    """Its client was written for LocalAI's file server."""
    file = tmp_path / "weights"
    file.write_bytes(CONTENT)
    where = FileServerAddress("w1", f"http://127.0.0.1:{server.rig.port}")
    key = "models/m/50% of #1?.bin"
    upload = Upload(server.root / key)
    upload.open(append=False, target=sha(CONTENT), total=len(CONTENT))
    upload.write([CONTENT[:1_000_000]])
    upload.close()
    seen: list[int] = []
    async with FileServers("", SystemClock()) as client:
        path = await client.ensure(where, key, file, f"sha256:{sha(CONTENT)}", seen.append)
        assert Path(path) == server.root / key
        assert seen[0] >= 1_000_000, "it went on where an earlier attempt stopped"
        assert await client.ensure(where, key, file, f"sha256:{sha(CONTENT)}", seen.append) == path
        assert await client.list_(where, "models/m") == ("50% of #1?.bin", "50% of #1?.bin.sha256")
        assert await client.list_(where, "models/none") == ()
    assert (server.root / key).read_bytes() == CONTENT


async def test_a_download_has_length_hash_and_ranges(server: Server) -> None:
    await server.put(W, CONTENT)
    whole = await server.call("GET", W)
    assert (whole.status, whole.body) == (200, CONTENT)
    assert whole.get(b"content-length") == b"3000000"
    assert whole.get(b"content-type") == b"application/octet-stream"
    assert whole.get(b"x-content-sha256") == sha(CONTENT).encode()
    part = await server.call("GET", W, range="bytes=1000-1999")
    assert (part.status, part.body) == (206, CONTENT[1000:2000])
    assert part.get(b"content-range") == b"bytes 1000-1999/3000000"
    rest = await server.call("GET", W, range="bytes=2900000-", if_range=(part.get(b"etag") or b"").decode())
    assert (rest.status, rest.body) == (206, CONTENT[2_900_000:])
    changed = await server.call("GET", W, range="bytes=2900000-", if_range='"older"')
    assert (changed.status, changed.body) == (200, CONTENT)
    behind = await server.call("GET", W, range="bytes=3000000-")
    assert (behind.status, behind.get(b"content-range")) == (416, b"bytes */3000000")
    assert (await server.call("GET", W, range="bytes=0-1,3-4")).status == 200


async def test_a_file_that_shrinks_under_a_reader_is_cut(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    await server.put(W, CONTENT)
    monkeypatch.setattr(os, "pread", lambda *_: b"")
    client = await server.rig.client()
    await client.send(make_request("GET", W))
    assert len((await client.rest()).partition(b"\r\n\r\n")[2]) < len(CONTENT)


async def test_temporary_outputs(server: Server) -> None:
    first, second = (
        path_in(await server.call("POST", "/v1/files/temp", b"")),
        path_in(await server.call("POST", "/v1/files/temp", b"{}")),
    )
    assert first != second
    assert first.parent == server.root / "staging"
    assert first.name.startswith("localai-output-")
    assert first.name.endswith(".tmp")
    assert first.read_bytes() == b""
    first.write_bytes(b"spoken")  # as a backend does
    answer = await server.call("GET", f"/v1/files/{first.name}")
    assert (answer.status, answer.body) == (200, b"spoken")


async def test_a_list_names_files_below_a_folder(server: Server) -> None:
    for name in ("a.bin", "sub/b.bin"):
        await server.put(f"/v1/files/models/m/{name}", b"x")
    listed = await server.call("GET", "/v1/files-list/models/m")
    expected = {"files": ["a.bin", "a.bin.sha256", "sub/b.bin", "sub/b.bin.sha256"]}
    assert (listed.status, json.loads(listed.body)) == (200, expected)
    assert listed.get(b"content-type") == b"application/json"


@pytest.mark.parametrize("ranged", [False, True])
async def test_a_disk_that_fills_up_leaves_nothing_behind(
    server: Server, monkeypatch: pytest.MonkeyPatch, ranged: bool
) -> None:
    await server.put(W, b"old")
    left = server.left()
    write, room = Upload.write, [1_500_000]

    def fill(self: Upload, pieces: Any) -> None:
        write(self, pieces)
        room[0] -= sum(map(len, pieces))
        if room[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Upload, "write", fill)
    answer = await (server.put_range(W, CONTENT, 0, 3_000_000) if ranged else server.put(W, CONTENT))
    assert answer.status == 507
    assert b"the disk is full" in answer.body
    assert server.left() == left
    assert (await server.call("GET", W)).body == b"old"


async def test_a_disk_without_room_takes_no_byte(tmp_path: Path) -> None:
    async with serve(tmp_path, space=DiskSpace(1 << 60)) as server:
        for answer in (await server.put(W, b"x"), await server.put_range(W, b"xy", 0, 1)):
            assert answer.status == 507
            assert b"not enough disk" in answer.body
        assert server.left() == []


async def test_another_failure_of_the_disk(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Upload, "write", fail)
    answer = await server.put(W, b"x")
    assert (answer.status, answer.body) == (500, b"writing file: Input/output error\n")
    assert server.left() == []


async def test_a_client_that_leaves_a_whole_upload_leaves_nothing(server: Server) -> None:
    client = await server.rig.client()
    await client.send(make_request("PUT", W, CONTENT)[:-1000])
    await until(lambda: server.left() and _partial_size(server) > 0, "the upload")
    client.abort()
    await until(lambda: server.left() == [], "nothing left")


async def test_memory_stays_flat(tmp_path: Path) -> None:
    """The client sends faster than the disk writes: bytes wait in the client, not in the worker."""
    async with serve(tmp_path, limit_bytes=0) as server:
        held: list[int] = []
        write = Upload.write

        def watch(self: Upload, pieces: Any) -> None:
            held.append(sum(map(len, pieces)))
            write(self, pieces)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Upload, "write", watch)
            content = bytes(64 << 20)
            assert (await server.put(W, content, x_content_sha256=sha(content))).status == 200
        assert sum(held) == 64 << 20
        assert max(held) < 2 << 20


async def test_old_files_of_requests_are_swept(server: Server) -> None:
    old = path_in(await server.put("/v1/files/ephemeral/inputs/1/old.wav", b"x"))
    new = path_in(await server.put("/v1/files/ephemeral/inputs/2/new.wav", b"x"))
    output = path_in(await server.call("POST", "/v1/files/temp", b""))
    await server.put_range(W, CONTENT, 0, 1_000_000)
    await server.put("/v1/files/models/m/kept", b"x")
    partials = [path for path in server.root.rglob(".corral-upload-*")]
    await server.put("/v1/files/kept-too", b"x")
    for path in (old, output, old.parent, *partials, old.with_name("old.wav.sha256")):
        os.utime(path, (1, 1))
    for name in ("models/m/kept", "staging/kept-too"):
        os.utime(server.root / name, (1, 1))
    cache = server.root / "cache/staging-tmp/localai-staging-1.tmp"
    cache.parent.mkdir(parents=True)
    cache.write_text("x")
    os.utime(cache, (1, 1))
    sweep = FileSweep(FileFolders.beside(server.root / "models"), SystemClock(), keep_s=3600)
    await sweep.sweep()
    assert new.exists()
    assert not old.parent.exists()
    assert [name for name in server.left() if not name.endswith(".sha256")] == [
        "models/m/kept",
        "staging/ephemeral/inputs/2/new.wav",
        "staging/kept-too",
    ]


async def test_a_slow_body_ends_with_a_line_of_text(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    routes = FileRoutes(FileFolders.beside(tmp_path / "models"), space=DiskSpace(0))

    class Handler:
        async def handle(self, request: Request, responder: Responder) -> None:
            await routes.handle(request, responder)

    async with rig(handler=Handler(), limits=Limits(timeouts=quick(body_idle_s=0.2))) as r:
        client = await r.client()
        await client.send(make_request("PUT", W, CONTENT)[:-1000])
        answer = await client.answer()
        assert (answer.status, answer.body) == (408, b"the body stopped arriving\n")
