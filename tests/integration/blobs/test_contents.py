"""Every kind of source, opened and written into a folder."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import io
import tarfile
import zipfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from corral.blobs.contents import Contents, OpenedSource
from corral.blobs.disk import DiskSpace
from corral.blobs.errors import BadArchive, NoBuild, NoSpace, UnsafeArchive, WrongDigest
from corral.blobs.progress import Progress
from corral.blobs.sources.context import SourceContext
from corral.contract.messages.backends import Phase
from corral.contract.sources import Source, TextFile
from corral.kit.errors import Conflict, Invalid, NotFound
from tests.support.blob_server import BlobServer
from tests.support.image_registry import (
    ImageRegistry,
    layer,
    make_image,
    push_image,
    registry,
    run_file,
    save_image,
)
from tests.support.installing import files_of, names_in, open_source_context
from tests.support.waiting import until

__all__ = ["registry"]  # a fixture


@pytest.fixture
async def means(tmp_path: Path) -> AsyncIterator[SourceContext]:
    async with open_source_context(tmp_path) as means:
        yield means


@pytest.fixture
def target(tmp_path: Path) -> Path:
    folder = tmp_path / "target"
    folder.mkdir()
    return folder


@pytest.fixture
async def server() -> AsyncIterator[BlobServer]:
    async with BlobServer() as server:
        yield server


class Write:
    """Opens and writes; remembers what was told."""

    def __init__(self, means: SourceContext, target: Path) -> None:
        self.contents = Contents(means)
        self.target = target
        self.told: list[Progress] = []

    async def __call__(self, source: Source) -> OpenedSource:
        async with self.contents.open(source, self.told.append) as opened:
            await opened.write_to(self.target, self.told.append)
            return opened

    @property
    def phases(self) -> list[str]:
        return list(dict.fromkeys(progress.phase.value for progress in self.told))


@pytest.fixture
def write(means: SourceContext, target: Path) -> Write:
    return Write(means, target)


def tarball(files: dict[str, bytes]) -> bytes:
    return layer(dict(files))


def sha256(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


# Images


async def test_an_image_with_layers_and_whiteouts(
    registry: ImageRegistry, write: Write, target: Path, means: SourceContext
) -> None:
    layers = [
        layer({"run.sh": run_file(), "lib/old": b"1", "lib/keep": b"1", "usr/bin": None, "bin": "usr/bin"}),
        layer({"lib/.wh.old": b"", "bin/tool": b"2", "etc/link": "/usr/bin/tool"}),
        layer({"run.sh": run_file("two")}),
    ]
    image = make_image({"linux/amd64": layers, "linux/arm64": [layer({"run.sh": b"no"})]})
    push_image(registry.url, "contents/image", "1", image)
    opened = await write(Source("oci", f"{registry.host}/contents/image:1"))
    assert (opened.digest, opened.content_digest) == (image.digest, image.manifests["linux/amd64"][0])
    assert files_of(target) == {
        "etc/link": b"2",
        "lib/keep": b"1",
        "run.sh": run_file("two"),
        "usr/bin/tool": b"2",
    }
    assert (target / "etc" / "link").read_bytes() == b"2"  # an absolute link is the image's own
    assert write.phases == ["resolving", "downloading", "verifying", "extracting"]
    total = sum(map(len, layers))
    downloads = [each for each in write.told if each.phase is Phase.DOWNLOADING]
    assert (downloads[-1].current_bytes, downloads[-1].total_bytes) == (total, total)
    done = [each.current_bytes for each in downloads]
    assert done == sorted(done)  # one bar for all layers: it never goes back
    assert (write.told[-1].phase, write.told[-1].current_bytes) == ("extracting", total)
    write.contents.discard(opened)
    assert all(means.store.find(digest) is None for digest in opened.blobs)


async def test_the_order_says_which_image_not_the_tag(registry: ImageRegistry, write: Write) -> None:
    old, new = (make_image({"linux/amd64": [layer({"run.sh": run_file(text)})]}) for text in ("old", "new"))
    for image in (old, new):
        push_image(registry.url, "contents/pinned", "latest", image)
    opened = await write(Source("oci", f"{registry.host}/contents/pinned:latest", digest=old.digest))
    assert opened.digest == old.digest
    assert (write.target / "run.sh").read_bytes() == run_file("old")


async def test_the_same_layer_twice(registry: ImageRegistry, write: Write) -> None:
    same = layer({"run.sh": run_file()})
    push_image(registry.url, "contents/twice", "1", make_image({"linux/amd64": [same, same]}))
    await write(Source("oci", f"{registry.host}/contents/twice:1"))
    assert (write.target / "run.sh").exists()


async def test_an_image_for_another_machine(registry: ImageRegistry, write: Write) -> None:
    push_image(registry.url, "contents/arm", "1", make_image({"linux/arm64": [layer({"run.sh": run_file()})]}))
    with pytest.raises(NoBuild):
        await write(Source("oci", f"{registry.host}/contents/arm:1"))
    await write(Source("oci", f"{registry.host}/contents/arm:1", platform="linux/arm64"))


async def test_an_image_whose_layer_reaches_outside(registry: ImageRegistry, write: Write) -> None:
    bad = make_image({"linux/amd64": [layer({"run.sh": run_file()}), layer({"../out": b"x"})]})
    push_image(registry.url, "contents/bad", "1", bad)
    with pytest.raises(UnsafeArchive, match="climbs out"):
        await write(Source("oci", f"{registry.host}/contents/bad:1"))
    assert not (write.target.parent / "out").exists()


async def test_an_image_that_does_not_fit_is_refused_before_a_byte_is_fetched(
    registry: ImageRegistry, tmp_path: Path
) -> None:
    push_image(registry.url, "contents/fit", "1", make_image({"linux/amd64": [layer({"run.sh": run_file()})]}))
    (tmp_path / "t").mkdir()
    async with open_source_context(tmp_path, room=DiskSpace(reserve_bytes=0, measure=lambda _folder: 100)) as means:
        write = Write(means, tmp_path / "t")
        with pytest.raises(NoSpace, match="not enough disk"):
            await write(Source("oci", f"{registry.host}/contents/fit:1"))
        assert write.phases == ["resolving"]


# Archives


@pytest.mark.parametrize("digest", [True, False])
async def test_an_archive_from_a_url(server: BlobServer, write: Write, digest: bool) -> None:
    data = tarball({"run.sh": run_file(), "lib/x": b"1"})
    opened = await write(Source("http", server.put("/x", data), digest=sha256(data) if digest else ""))
    assert opened.digest == opened.content_digest == sha256(data)
    assert files_of(write.target) == {"run.sh": run_file(), "lib/x": b"1"}
    assert write.phases == ["downloading", "verifying", "extracting"]
    assert opened.blobs == (sha256(data),)


async def test_an_archive_that_is_another_one(server: BlobServer, write: Write) -> None:
    data = tarball({"run.sh": run_file()})
    with pytest.raises(WrongDigest):
        await write(Source("http", server.put("/x", data), digest=sha256(b"")))


async def test_an_archive_cancelled_on_purpose_leaves_nothing(
    server: BlobServer, write: Write, means: SourceContext
) -> None:
    data = tarball({"run.sh": bytes(5_000_000)}) + bytes(5_000_000)
    for digest in ("", sha256(data)):
        server.pause.clear()
        server.asked.clear()
        task = asyncio.create_task(write(Source("http", server.put("/x", data), digest=digest)))
        await until(lambda: server.asked)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert [path for path in means.store.folder.rglob("*") if path.is_file()] == []
        server.pause.set()


async def test_an_archive_on_this_disk(write: Write, tmp_path: Path) -> None:
    path = tmp_path / "x.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("run.sh", run_file())
    opened = await write(Source("file", str(path)))
    assert opened.digest == sha256(path.read_bytes())
    assert files_of(write.target) == {"run.sh": run_file()}
    with pytest.raises(WrongDigest):
        await write(Source("file", str(path), digest=sha256(b"")))
    with pytest.raises(NotFound, match="there is no file"):
        await write(Source("file", str(tmp_path / "missing")))


async def test_an_archive_on_this_disk_named_by_its_path_alone(write: Write, tmp_path: Path) -> None:
    """`--uri /srv/x.tar.gz`: what lies there says what it is."""
    path = tmp_path / "x.tar.gz"
    path.write_bytes(layer({"run.sh": run_file()}))
    opened = await write(Source("directory", str(path)))
    assert opened.digest == sha256(path.read_bytes())
    assert files_of(write.target) == {"run.sh": run_file()}


# Folders


async def test_a_folder_is_copied(write: Write, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "lib").mkdir(parents=True)
    (source / "run.sh").write_bytes(run_file())
    (source / "lib" / "x").write_bytes(b"1")
    opened = await write(Source("directory", str(source)))
    assert files_of(write.target) == files_of(source)
    async with write.contents.open(Source("file", str(source))) as reopened:  # file:// may name a folder too
        assert reopened.digest == opened.digest
    (source / "lib" / "x").write_bytes(b"2")
    async with write.contents.open(Source("directory", str(source))) as changed:
        assert changed.digest != opened.digest
    with pytest.raises(WrongDigest):
        async with write.contents.open(Source("directory", str(source), digest=opened.digest)):
            pass


async def test_a_folder_that_changes_while_it_is_copied(write: Write, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "run.sh").write_bytes(run_file())
    async with write.contents.open(Source("directory", str(source))) as opened:
        (source / "new").touch()
        with pytest.raises(Conflict, match="changed while it was copied: new"):
            await opened.write_to(write.target)


async def test_a_folder_is_not_copied_into_itself(write: Write, tmp_path: Path) -> None:
    with pytest.raises(Invalid, match="contains the folder"):
        await write(Source("directory", str(tmp_path)))
    with pytest.raises(NotFound, match="there is no folder"):
        await write(Source("directory", str(tmp_path / "missing")))


# Images in a file


@pytest.mark.parametrize("layout", ["oci", "docker"])
@pytest.mark.parametrize("packed", [False, True])
async def test_an_image_in_a_file(write: Write, tmp_path: Path, layout: str, packed: bool) -> None:
    layers = [layer({"run.sh": run_file(), "old": b"1"}), layer({".wh.old": b"", "lib/x": b"2"})]
    path = tmp_path / "image.tar"
    save_image(path, make_image({"linux/amd64": layers}), layout=layout)
    if packed:
        path.write_bytes(gzip.compress(path.read_bytes()))
    opened = await write(Source("ocifile", str(path)))
    assert opened.digest == sha256(path.read_bytes())
    assert files_of(write.target) == {"run.sh": run_file(), "lib/x": b"2"}
    assert names_in(tmp_path) == ["blobs", "image.tar", "target"]


async def test_an_image_in_a_file_of_several_platforms(write: Write, tmp_path: Path) -> None:
    path = tmp_path / "image.tar"
    save_image(path, make_image({p: [layer({"run.sh": run_file(p)})] for p in ("linux/arm64", "linux/amd64")}))
    await write(Source("ocifile", str(path)))
    assert (write.target / "run.sh").read_bytes() == run_file("linux/amd64")
    with pytest.raises(NoBuild):
        await write(Source("ocifile", str(path), platform="linux/riscv64"))


@pytest.mark.parametrize("layout", ["oci", "docker"])
async def test_an_image_in_a_file_that_was_damaged(write: Write, tmp_path: Path, layout: str) -> None:
    path = tmp_path / "image.tar"
    marker = b"find me, change me" * 10
    plain = layer({"run.sh": run_file(), "data": marker}, compress=False)
    image = make_image({"linux/amd64": [plain if layout == "oci" else gzip.compress(plain)]})
    save_image(path, image, layout=layout)
    data = path.read_bytes()
    assert marker in data
    path.write_bytes(data.replace(marker, marker.replace(b"find", b"lost")))
    with pytest.raises(WrongDigest, match="a layer is"):
        await write(Source("ocifile", str(path)))


async def test_what_is_no_image_in_a_file(write: Write, tmp_path: Path) -> None:
    path = tmp_path / "image.tar"
    for content in (b"", b"nonsense" * 200, layer({"a": b"1"}, compress=False)):
        path.write_bytes(content)
        with pytest.raises(BadArchive):
            await write(Source("ocifile", str(path)))
    two = io.BytesIO()
    with tarfile.open(fileobj=two, mode="w") as archive:
        body = b'[{"Config":"a"},{"Config":"b"}]'
        info = tarfile.TarInfo("manifest.json")
        info.size = len(body)
        archive.addfile(info, io.BytesIO(body))
    path.write_bytes(two.getvalue())
    with pytest.raises(BadArchive, match="contains 2 images"):
        await write(Source("ocifile", str(path)))


# Files that come with the order


async def test_inline_files(write: Write) -> None:
    files = (TextFile("run.sh", "#!/bin/sh\n", True), TextFile("lib/glue.py", "x = 'é'\n"))
    opened = await write(Source("inline", "glue", files=files))
    assert files_of(write.target) == {"run.sh": b"#!/bin/sh\n", "lib/glue.py": "x = 'é'\n".encode()}
    assert (write.target / "run.sh").stat().st_mode & 0o777 == 0o755
    async with write.contents.open(Source("inline", "glue", files=files[::-1])) as same:
        assert same.content_digest == opened.content_digest
    async with write.contents.open(Source("inline", "glue", files=files[:1])) as other:
        assert other.content_digest != opened.content_digest


async def test_glue_makes_another_version_of_the_same_content(server: BlobServer, write: Write) -> None:
    data = tarball({"engine": b"1", "serve.py": b"old"})
    plain = Source("http", server.put("/x", data))
    glued = Source("http", plain.uri, files=(TextFile("serve.py", "new"),))
    async with write.contents.open(plain) as without:
        pass
    opened = await write(glued)
    assert opened.digest == without.digest
    assert opened.content_digest != without.content_digest
    assert files_of(write.target) == {"engine": b"1", "serve.py": b"new"}


async def test_glue_is_not_written_through_a_link(server: BlobServer, write: Write, tmp_path: Path) -> None:
    data = layer({"real": None, "lib": "real", "file": "real/x"})
    url = server.put("/x", data)
    with pytest.raises(UnsafeArchive, match="through a link"):
        await write(Source("http", url, files=(TextFile("lib/x", "1"),)))
    for path in ("../x", "/etc/x", "a/../../x", ""):
        with pytest.raises(Invalid):
            await write(Source("http", url, files=(TextFile(path, "1"),)))


async def test_glue_replaces_a_link_of_its_own_name(server: BlobServer, write: Write) -> None:
    await write(Source("http", server.put("/x", layer({"real": b"1", "x": "real"})), files=(TextFile("x", "2"),)))
    assert files_of(write.target) == {"real": b"1", "x": b"2"}


async def test_a_kind_from_the_future(write: Write) -> None:
    with pytest.raises(Invalid, match="kind of source that this version does not support"):
        await write(Source("ipfs", "x"))
