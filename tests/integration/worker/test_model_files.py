"""Files of models come to a worker whole, once, and go when nobody uses them."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import psutil
import pytest

from corral.blobs.disk import DiskSpace
from corral.blobs.errors import NoSpace
from corral.blobs.progress import Progress
from corral.blobs.transfer.fetcher import FetchLimits
from corral.blobs.transfer.remote import open_session
from corral.contract.codec import encode
from corral.contract.messages.replicas import ReplicaFile
from corral.kit.clock import SystemClock
from corral.kit.errors import Denied, Invalid, NotFound, Unreachable
from corral.worker.files.cleanup import CleanupPolicy
from corral.worker.files.file_sets import FileSets
from corral.worker.files.fleet_blobs import FleetBlobs
from corral.worker.files.model_files import WorkerFiles, remove_model
from tests.support.blob_server import BlobServer
from tests.support.blob_source import BlobSource, blob_source
from tests.support.waiting import until

WEIGHTS = os.urandom(2_499_999) + b"w"


@dataclass
class Site:
    models: Path
    files: WorkerFiles
    source: BlobSource
    session: aiohttp.ClientSession
    busy: set[Path] = field(default_factory=set)
    free: Callable[[], int] = lambda: 100 << 30
    told: list[Progress] = field(default_factory=list)

    async def ensure(self, *files: ReplicaFile, urls: tuple[str, ...] | None = None, token: str | None = None) -> None:
        urls = self.source.urls if urls is None else urls
        await self.files.ensure(files, urls, self.source.token if token is None else token, self.told.append)

    def blobs(self) -> list[str]:
        return sorted(os.listdir(self.models / ".blobs" / "sha256"))

    def age(self, seconds: float) -> None:
        for path in (self.models / ".blobs").rglob("*"):
            if path.is_file():
                os.utime(path, (path.stat().st_mtime - seconds,) * 2)


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    models = tmp_path / "models"
    models.mkdir()
    async with blob_source(tmp_path) as source, open_session(inside=True) as session:
        made: list[Site] = []
        files = WorkerFiles(
            models,
            FleetBlobs(session, controller="http://127.0.0.1:8080"),
            SystemClock(),
            in_use=lambda: made[0].busy,
            space=DiskSpace(reserve_bytes=0, measure=lambda _folder: made[0].free()),
            cleanup=CleanupPolicy(unused_s=1000.0, partial_s=1000.0),
            limits=FetchLimits(tries=2, first_wait_s=0.01, cap_wait_s=0.01),
        )
        made.append(Site(models, files, source, session))
        yield made[0]


async def test_files_come_once_and_are_shared(site: Site) -> None:
    weights, extra = site.source.add("m/one/w.gguf", WEIGHTS), site.source.add("m/one/sub/tokenizer.json", b"{}")
    await site.ensure(weights, extra)
    assert (site.models / "m/one/w.gguf").read_bytes() == WEIGHTS
    assert (site.models / "m/one/sub/tokenizer.json").read_bytes() == b"{}"
    assert (site.models / "m/one/w.gguf").stat().st_mode & 0o777 == 0o444
    last = site.told[-1]
    assert (last.current_bytes, last.total_bytes) == (len(WEIGHTS) + 2, len(WEIGHTS) + 2)
    assert (last.file_index, last.file_count) == (2, 2)
    have = [progress.current_bytes for progress in site.told]
    assert have == sorted(have)
    sent = site.source.listener.sent_bytes
    await site.ensure(weights, extra)
    await site.ensure(ReplicaFile("other/two/same.gguf", weights.digest, weights.size_bytes))
    assert site.source.listener.sent_bytes == sent
    assert (site.models / "other/two/same.gguf").samefile(site.models / "m/one/w.gguf")


async def test_files_that_are_here_are_not_read_again(site: Site) -> None:
    weights = site.source.add("m/one/w.gguf", os.urandom(9 << 20))
    await site.ensure(weights)
    before = psutil.Process().io_counters().read_chars
    for _ in range(2):
        await site.ensure(weights)
    await site.ensure(ReplicaFile("other/two/same.gguf", weights.digest, weights.size_bytes))
    assert psutil.Process().io_counters().read_chars - before < 1 << 20


async def test_a_transfer_that_is_cut_goes_on(site: Site) -> None:
    file = site.source.add("m/one/w.gguf", WEIGHTS)
    async with BlobServer() as server:
        server.put(f"/blobs/{file.digest}", WEIGHTS)
        server.cut_after = [1_000_000]
        server.hold_after = 1_000_000  # what is left does not come before it is given up
        server.pause.clear()
        asking = asyncio.create_task(site.ensure(file, urls=(server.url(""),)))
        await until(lambda: server.asked)
        server.pause.set()
        await until(lambda: len(server.asked) == 2)  # the first answer was cut, and what came of it is kept
        asking.cancel()
        await asyncio.wait([asking])
    assert not (site.models / "m").exists()
    await site.ensure(file)
    assert (site.models / "m/one/w.gguf").read_bytes() == WEIGHTS
    assert site.source.listener.sent_bytes <= len(WEIGHTS) - 900_000


async def test_the_next_source_is_asked(site: Site) -> None:
    file = site.source.add("m/one/w.gguf", b"abc")
    async with BlobServer() as empty:
        await site.ensure(file, urls=(empty.url("/"), *site.source.urls))
    assert (site.models / "m/one/w.gguf").read_bytes() == b"abc"


async def test_what_cannot_be_had(site: Site) -> None:
    absent = ReplicaFile("m/one/w.gguf", "sha256:" + "0" * 64, 3)
    with pytest.raises(NotFound, match=r"m/one/w\.gguf"):
        await site.ensure(absent)
    with pytest.raises(NotFound, match="names no source"):
        await site.ensure(absent, urls=())
    with pytest.raises(Denied):
        await site.ensure(absent, token="stolen")
    for path in ("../x", "/etc/passwd", ".blobs/sha256/x"):
        with pytest.raises(Invalid):
            await site.ensure(ReplicaFile(path, "sha256:" + "0" * 64))
    with pytest.raises(Invalid):
        await site.ensure(ReplicaFile("m/x", "md5:1"))
    assert not (site.models / "m").exists()


@pytest.mark.parametrize(
    "name", ["w b c.gguf", "wörter/模型 1.gguf", "a'b\"c;$(d).gguf", "-rf", "w" * 200, "%2e%2e%2fx"]
)
async def test_names_are_kept_as_they_are(site: Site, name: str) -> None:
    file = site.source.add(f"m/one/{name}", b"abc")
    await site.ensure(file)
    assert (site.models / "m/one" / name).read_bytes() == b"abc"
    assert (await site.files.measure([file])).have_bytes == (3,)


async def test_an_empty_file_is_a_file(site: Site) -> None:
    files = [site.source.add("m/one/empty", b""), site.source.add("m/one/w.gguf", b"abc")]
    for _ in range(2):
        await site.ensure(*files)
        assert (site.models / "m/one/empty").read_bytes() == b""
    assert len(site.blobs()) == 2


async def test_a_link_that_leads_out_is_not_written_through(site: Site, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (site.models / "m").symlink_to(outside)
    with pytest.raises(Invalid, match="leads out of the models folder"):
        await site.ensure(site.source.add("m/one/deep/w.gguf", b"abc"))
    assert os.listdir(outside) == []


async def test_what_is_behind_a_link_is_not_removed(site: Site, tmp_path: Path) -> None:
    """A user moved the folder of a model elsewhere and put a link in its place."""
    await site.ensure(site.source.add("m/one/w.gguf", b"abc"))
    (site.models / "m").rename(tmp_path / "moved")
    (site.models / "m").symlink_to(tmp_path / "moved")
    site.age(2000.0)
    await site.files.sweep()
    assert (tmp_path / "moved/one/w.gguf").read_bytes() == b"abc"


async def test_a_model_that_is_deleted_while_another_stages_the_same_file(site: Site) -> None:
    shared = site.source.add("one/x/w.gguf", WEIGHTS)
    same = ReplicaFile("two/x/w.gguf", shared.digest, shared.size_bytes)
    told: list[Progress] = []
    first = asyncio.create_task(site.ensure(shared))
    second = asyncio.create_task(site.files.ensure((same,), site.source.urls, site.source.token, told.append))
    await until(
        lambda: site.told and told, "the first bytes, for both"
    )  # the second takes part in the transfer by then
    first.cancel()  # its model was deleted
    await asyncio.wait([first])
    await asyncio.to_thread(remove_model, site.models, "one")
    await site.files.keep_only(["two"])
    await second
    assert (site.models / "two/x/w.gguf").read_bytes() == WEIGHTS
    assert site.source.listener.sent_bytes == len(WEIGHTS)
    # The other way round: both are here, one is deleted.
    await site.ensure(shared)
    await asyncio.to_thread(remove_model, site.models, "two")
    await site.files.tidy()
    assert (site.models / "one/x/w.gguf").read_bytes() == WEIGHTS
    assert site.source.listener.sent_bytes == len(WEIGHTS)


async def test_a_token_that_has_run_out_is_renewed(site: Site) -> None:
    file, asked = site.source.add("m/one/w.gguf", b"abc"), list[str]()

    async def fresh() -> str:
        asked.append("please")
        return site.source.token

    site.files = WorkerFiles(site.models, FleetBlobs(site.session, fresh_token=fresh), SystemClock())
    await site.ensure(file, token="old")
    assert (site.models / "m/one/w.gguf").read_bytes() == b"abc"
    await site.ensure(site.source.add("m/one/v.gguf", b"def"))
    assert asked == ["please"]


async def test_wrong_bytes_never_get_a_name(site: Site) -> None:
    file = site.source.add("m/one/w.gguf", WEIGHTS)
    site.source.store.path(file.digest).write_bytes(WEIGHTS[:-1] + b"x")
    with pytest.raises(Exception, match="twice"):
        await site.ensure(file)
    assert not (site.models / "m").exists()
    assert site.blobs() == []


async def test_a_file_somebody_put_there_is_taken_if_it_is_the_one(site: Site) -> None:
    (site.models / "m").mkdir()
    (site.models / "m" / "w.gguf").write_bytes(WEIGHTS)
    file = site.source.add("m/w.gguf", WEIGHTS)
    await site.ensure(file, urls=())
    assert site.source.listener.sent_bytes == 0
    (site.models / "m" / "v.gguf").write_bytes(WEIGHTS[:-1] + b"x")
    other = site.source.add("m/v.gguf", WEIGHTS[:-1] + b"y")
    await site.ensure(other)
    assert (site.models / "m" / "v.gguf").read_bytes() == WEIGHTS[:-1] + b"y"


async def test_what_was_not_used_for_long_goes(site: Site) -> None:
    old, busy = site.source.add("old/one/w.gguf", b"old"), site.source.add("busy/one/w.gguf", b"busy")
    (site.models / "mine.gguf").write_bytes(b"not brought by us")
    await site.ensure(old)
    await site.ensure(busy)
    site.busy.add(site.models / "busy/one/w.gguf")
    site.age(2000.0)
    await site.files.sweep()
    assert not (site.models / "old").exists()
    assert (site.models / "busy/one/w.gguf").exists()
    assert (site.models / "mine.gguf").exists()
    assert site.blobs() == [busy.digest.removeprefix("sha256:")]


async def test_files_in_a_folder_that_is_in_use_stay(site: Site) -> None:
    shard, config = site.source.add("m/one/org/big/1.safetensors", b"1"), site.source.add("m/one/org/big/c.json", b"{}")
    await site.ensure(shard, config)
    site.busy.add(site.models / "m/one/org/big")  # engines of many files are given their folder
    site.age(2000.0)
    await site.files.sweep()
    site.free = lambda: 0
    with pytest.raises(NoSpace):
        await site.ensure(site.source.add("other/one/w.gguf", b"other"))
    assert (site.models / shard.path).exists()
    assert (site.models / config.path).exists()


async def test_files_of_deleted_models_go(site: Site) -> None:
    for model in ("gone", "here", "here/too", "busy", "new"):
        await site.ensure(site.source.add(f"{model}/one/w", model.encode()))
    site.busy.add(site.models / "busy/one/w")
    site.age(31.0)
    await site.ensure(site.source.add("new/one/w", b"new"))
    await site.files.keep_only(["here", "her", "here/too"])
    left = sorted(path.parent.parent.relative_to(site.models).as_posix() for path in site.models.glob("**/one/w"))
    assert left == ["busy", "here", "here/too", "new"]
    assert len(site.blobs()) == 4


async def test_a_blob_nearby_is_linked_and_nothing_is_sent(site: Site) -> None:
    file = site.source.add("m/one/w.gguf", WEIGHTS)
    nearby = site.source.store.path(file.digest)
    site.files = WorkerFiles(site.models, FleetBlobs(site.session), SystemClock(), nearby=nearby.parent)
    await site.ensure(file)
    assert (site.models / file.path).samefile(nearby)
    assert site.source.listener.sent_bytes == 0
    short = site.source.add("m/one/v.gguf", b"abc")
    site.source.store.path(short.digest).write_bytes(b"ab")
    with pytest.raises(Exception, match="bytes, not 3"):
        await site.ensure(short)
    site.source.store.discard(file.digest)
    await site.ensure(file, urls=())
    shutil.rmtree(site.models / "m")
    await site.files.tidy()
    assert site.blobs() == []


async def test_room_is_made_by_the_longest_unused(site: Site) -> None:
    first, second = site.source.add("a/one/w", b"a" * 1000), site.source.add("b/one/w", b"b" * 1000)
    await site.ensure(first)
    site.age(10.0)
    await site.ensure(second)
    third = site.source.add("c/one/w", b"c" * 1000)
    site.free = lambda: 100 + 1000 * (2 - len(site.blobs()))
    await site.ensure(third)
    assert [name for name in ("a", "b", "c") if (site.models / name).exists()] == ["b", "c"]
    site.busy.update({site.models / "b/one/w", site.models / "c/one/w"})
    with pytest.raises(NoSpace):
        await site.ensure(site.source.add("d/one/w", b"d" * 1000))
    assert [name for name in ("b", "c", "d") if (site.models / name).exists()] == ["b", "c"]


async def test_no_room_is_made_with_what_is_about_to_be_read(site: Site) -> None:
    first, second = site.source.add("a/one/w", b"a" * 1000), site.source.add("b/one/w", b"b" * 1000)
    site.free = lambda: 1100 - 1000 * len(site.blobs())
    with site.files.protect([first]):
        await site.ensure(first)
        site.age(10.0)
        with pytest.raises(NoSpace):
            await site.ensure(second)
        assert (site.models / first.path).exists()
    await site.ensure(second)
    assert not (site.models / first.path).exists(), "but nobody has read it since"


async def test_the_limit_takes_the_longest_unused_and_says_what_is_in_use(site: Site) -> None:
    limited = WorkerFiles(
        site.models,
        FleetBlobs(site.session, controller="http://127.0.0.1:8080"),
        SystemClock(),
        in_use=lambda: site.busy,
        cleanup=CleanupPolicy(limit_bytes=2500),
    )
    site.files = limited
    for name in "abc":
        await site.ensure(site.source.add(f"{name}/one/w", name.encode() * 1000))
        site.age(10.0)
    assert [name for name in "abc" if (site.models / name).exists()] == ["b", "c"]
    assert len(site.blobs()) == 2
    site.busy.update({site.models / "b/one/w", site.models / "c/one/w"})
    with pytest.raises(NoSpace, match=r"--cache-limit is 2\.4 KiB and 2\.0 KiB of it are in use"):
        await site.ensure(site.source.add("d/one/w", b"d" * 1000))
    site.busy.clear()
    await site.ensure(site.source.add("d/one/w", b"d" * 1000))
    assert [name for name in "abcd" if (site.models / name).exists()] == ["c", "d"]


async def test_a_set_that_was_asked_for_since_it_was_chosen_stays(site: Site) -> None:
    file = site.source.add("a/one/w", b"a")
    await site.ensure(file)
    site.age(2000.0)
    sets = FileSets(site.models / ".blobs" / "sets", site.models)
    (chosen,) = sets.unused(frozenset())
    assert not sets.is_used(chosen, frozenset())
    assert sets.is_used(chosen, {site.models / "a/one"})
    await site.ensure(file)
    assert sets.is_used(chosen, frozenset())


async def test_a_persons_own_file_is_used_but_never_shared(site: Site) -> None:
    file = site.source.add("m/one/w", b"abc")
    own = site.models / file.path
    own.parent.mkdir(parents=True)
    own.write_bytes(b"abc")
    await site.ensure(file, urls=())
    assert site.blobs() == []
    await site.ensure(ReplicaFile("other/one/w", file.digest, 3))
    own.write_bytes(b"xyz")  # as people do
    assert (site.models / "other/one/w").read_bytes() == b"abc"
    await site.ensure(file, urls=())
    assert own.read_bytes() == b"abc", "what it should be, not what was written into it"


async def test_files_of_ours_are_blobs_again_when_somebody_emptied_their_folder(site: Site) -> None:
    file = site.source.add("m/one/w", b"abc")
    await site.ensure(file)
    shutil.rmtree(site.models / ".blobs" / "sha256")
    (site.models / ".blobs" / "sha256").mkdir()
    await site.ensure(file, urls=())
    assert len(site.blobs()) == 1


async def test_a_list_of_files_too_long_for_an_order(site: Site) -> None:
    files = tuple(site.source.add(f"m/one/{number}", str(number).encode()) for number in range(50))
    listed = site.source.add("list", encode(files))
    assert await site.files.read_list(listed.digest, site.source.urls, site.source.token) == files
    assert site.blobs() == [], "it was for this order only"
    broken = site.source.add("list", b'{"path": 1}')
    with pytest.raises(Invalid, match="list of its files"):
        await site.files.read_list(broken.digest, site.source.urls, site.source.token)


async def test_nobody_answers(site: Site) -> None:
    file = site.source.add("m/one/w", b"x")
    with pytest.raises(Unreachable):
        await site.ensure(file, urls=("http://127.0.0.1:1",))
