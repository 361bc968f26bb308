"""Files that arrive in pieces: in order, verified as a whole, continued after a restart."""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from corral.blobs.disk import DiskSpace
from corral.blobs.errors import NoSpace, TooLarge
from corral.blobs.store import BlobStore
from corral.blobs.upload import Uploads, UploadStatus
from corral.kit.errors import Conflict, Invalid

DATA = os.urandom(5000)
DIGEST = "sha256:" + hashlib.sha256(DATA).hexdigest()
NO_RESERVE = DiskSpace(reserve_bytes=0)


@pytest.fixture
def store(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path / "blobs")


def partial_files(store: BlobStore) -> list[str]:
    return [path.name for path in (store.folder / "incoming").iterdir()]


async def test_pieces_become_a_blob(store: BlobStore) -> None:
    uploads = Uploads(store, NO_RESERVE)
    first = await uploads.append(DIGEST, 0, 5000, DATA[:2000])
    assert (first.received_bytes, first.complete) == (2000, False)
    last = await uploads.append(DIGEST, 2000, 5000, DATA[2000:])
    assert (last.received_bytes, last.complete) == (5000, True)
    assert store.get(DIGEST).path.read_bytes() == DATA
    assert partial_files(store) == []
    again = await uploads.append(DIGEST, 0, 5000, DATA[:2000])
    assert again.complete, "what is there need not be sent"


async def test_another_process_continues(store: BlobStore) -> None:
    await Uploads(store, NO_RESERVE).append(DIGEST, 0, 5000, DATA[:3000])
    after = Uploads(store, NO_RESERVE)
    assert (await after.status(DIGEST)).received_bytes == 3000
    assert (await after.append(DIGEST, 3000, 5000, DATA[3000:])).complete
    assert store.get(DIGEST).path.read_bytes() == DATA


async def test_another_process_completes_what_has_all_bytes(store: BlobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The controller was killed between the last byte and the end of the verification."""

    def fail(*_words: object) -> None:
        raise OSError(errno.EIO, "killed")

    with monkeypatch.context() as patch:
        patch.setattr(store, "accept", fail)
        with pytest.raises(OSError, match="killed"):
            await Uploads(store, NO_RESERVE).append(DIGEST, 0, 5000, DATA)
    after = Uploads(store, NO_RESERVE)
    assert (await after.status(DIGEST)) == UploadStatus(DIGEST, 5000, complete=False)
    with pytest.raises(Conflict):
        await after.append(DIGEST, 0, 5000, DATA)
    assert (await after.append(DIGEST, 5000, 5000, b"")).complete
    assert store.get(DIGEST).path.read_bytes() == DATA


async def test_a_piece_from_elsewhere_is_refused_and_loses_nothing(store: BlobStore) -> None:
    uploads = Uploads(store, NO_RESERVE)
    await uploads.append(DIGEST, 0, 5000, DATA[:1000])
    for offset in (0, 999, 1001, 4000):
        with pytest.raises(Conflict, match="stands at 1000 bytes"):
            await uploads.append(DIGEST, offset, 5000, DATA[:100])
    with pytest.raises(Invalid, match="go beyond the file's 5000"):
        await uploads.append(DIGEST, 1000, 5000, DATA)
    assert (await uploads.append(DIGEST, 1000, 5000, DATA[1000:])).complete


async def test_bytes_with_another_hash_leave_nothing_behind(store: BlobStore) -> None:
    uploads = Uploads(store, NO_RESERVE)
    await uploads.append(DIGEST, 0, 5000, DATA[:1000])
    with pytest.raises(Invalid, match=f"not {DIGEST}: the file changed while it was uploaded"):
        await uploads.append(DIGEST, 1000, 5000, b"\0" * 4000)
    assert store.find(DIGEST) is None
    assert (await uploads.status(DIGEST)).received_bytes == 0
    assert partial_files(store) == []
    assert (await uploads.append(DIGEST, 0, 5000, DATA)).complete


async def test_bytes_damaged_on_the_disk_are_found_after_a_restart(store: BlobStore) -> None:
    await Uploads(store, NO_RESERVE).append(DIGEST, 0, 5000, DATA[:3000])
    [partial] = (store.folder / "incoming").iterdir()
    partial.write_bytes(b"\0" * 3000)
    with pytest.raises(Invalid, match="damaged"):
        await Uploads(store, NO_RESERVE).append(DIGEST, 3000, 5000, DATA[3000:])


async def test_too_large_and_no_space_before_the_first_byte(store: BlobStore) -> None:
    with pytest.raises(TooLarge, match="--upload-limit-bytes"):
        await Uploads(store, NO_RESERVE, max_bytes=4999).append(DIGEST, 0, 5000, DATA[:10])
    full = DiskSpace(reserve_bytes=100, measure=lambda _folder: 5000)
    with pytest.raises(NoSpace, match="not enough disk for the uploaded file"):
        await Uploads(store, full).append(DIGEST, 0, 5000, DATA[:10])
    assert partial_files(store) == []


async def test_a_disk_that_is_full_in_the_middle_keeps_what_was_written(
    store: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    uploads = Uploads(store, NO_RESERVE)
    await uploads.append(DIGEST, 0, 5000, DATA[:1000])

    def fail(path: Path, offset: int, data: bytes) -> None:
        with path.open("r+b") as file:
            file.seek(offset)
            file.write(data[:100])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(uploads, "_write", fail)
        with pytest.raises(NoSpace):
            await uploads.append(DIGEST, 1000, 5000, DATA[1000:2000])
    assert (await uploads.status(DIGEST)).received_bytes == 1000
    assert (await uploads.append(DIGEST, 1000, 5000, DATA[1000:])).complete


async def test_cancelled_and_abandoned_uploads_are_removed(store: BlobStore) -> None:
    uploads = Uploads(store, NO_RESERVE)
    await uploads.append(DIGEST, 0, 5000, DATA[:1000])
    await uploads.cancel(DIGEST)
    assert (await uploads.status(DIGEST)).received_bytes == 0
    await uploads.append(DIGEST, 0, 5000, DATA[:1000])
    assert await store.sweep(older_than_s=3600) == 0
    [partial] = (store.folder / "incoming").iterdir()
    os.utime(partial, (0, 0))
    assert await store.sweep(older_than_s=3600) == 1
    assert (await uploads.append(DIGEST, 0, 5000, DATA)).complete, "the hash of the swept bytes is not used"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(st.lists(st.integers(1, 700), min_size=1, max_size=12), st.booleans())
async def test_any_pieces_give_the_same_file(tmp_path: Path, sizes: list[int], restart: bool) -> None:
    data = os.urandom(sum(sizes))
    digest = "sha256:" + hashlib.sha256(data).hexdigest()
    store = BlobStore(tmp_path / "blobs")
    uploads, at = Uploads(store, NO_RESERVE), 0
    for size in sizes:
        uploads = Uploads(store, NO_RESERVE) if restart else uploads
        status = await uploads.append(digest, at, len(data), data[at : at + size])
        at += size
        assert (status.received_bytes, status.complete) == (at, at == len(data))
    assert store.get(digest).path.read_bytes() == data
