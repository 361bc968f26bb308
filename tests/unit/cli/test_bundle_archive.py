"""Archives of bundles: what was written is read again, and everything else is refused before a byte of it is used."""

from __future__ import annotations

import hashlib
import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from corral.cli.bundle.archive import END, head_of, manifest_name, name_of, open_archive, padding_of, verify
from corral.contract.bundles import (
    FORMAT,
    BundledBlob,
    BundledFile,
    BundledModel,
    BundleManifest,
    digest_of_bundle,
    write_manifest,
)
from corral.kit.errors import Invalid
from corral.kit.threads import StopToken

CONTENTS = (b"weights" * 1000, b"x" * 512, b"y")


def digest_of(content: bytes) -> str:
    return "sha256:" + hashlib.sha256(content).hexdigest()


def a_manifest() -> BundleManifest:
    blobs = {digest_of(content): len(content) for content in CONTENTS}
    files = tuple(
        BundledFile(f"{number}.bin", f"https://host/{number}.bin", f"https://host/{number}.bin", digest, size)
        for number, (digest, size) in enumerate(blobs.items())
    )
    model = BundledModel("m", "", {"name": "m"}, files)
    return BundleManifest(FORMAT, "1", (), (model,), (), tuple(BundledBlob(*blob) for blob in sorted(blobs.items())))


def pack(manifest: BundleManifest) -> bytes:
    contents = {digest_of(content): content for content in CONTENTS}
    document = write_manifest(manifest)
    packed = head_of(manifest_name(document), len(document)) + document + padding_of(len(document))
    for blob in manifest.blobs:
        content = contents[blob.digest]
        packed += head_of(name_of(blob), len(content)) + content + padding_of(len(content))
    return packed + END


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "a.bundle"
    path.write_bytes(pack(a_manifest()))
    return path


def check(path: Path) -> None:
    verify(open_archive(path), lambda _done: None, StopToken())


def test_what_was_written_is_read(file: Path) -> None:
    archive = open_archive(file)
    check(file)
    assert archive.manifest == a_manifest()
    assert archive.digest == digest_of_bundle(write_manifest(a_manifest()))
    content = file.read_bytes()
    for blob in archive.manifest.blobs:
        at = archive.offsets[blob.digest]
        assert digest_of(content[at : at + blob.size_bytes]) == blob.digest


def test_any_tar_program_reads_it(file: Path) -> None:
    with tarfile.open(file) as archive:
        assert [member.size for member in archive.getmembers()[1:]] == [blob.size_bytes for blob in a_manifest().blobs]


def test_a_size_beyond_eight_gigabytes_fits_into_a_head() -> None:
    size = 100 << 30
    assert tarfile.TarInfo.frombuf(head_of("blobs/x", size), "utf-8", "strict").size == size


def test_a_truncated_archive_is_refused_wherever_it_ends(file: Path) -> None:
    content = file.read_bytes()
    for end in (0, 1, 511, 512, 700, 1024, len(content) // 2, len(content) - 1024, len(content) - 1):
        file.write_bytes(content[:end])
        with pytest.raises(Invalid, match=r"is not complete|is no bundle|cannot be read"):
            open_archive(file)


def test_a_changed_byte_anywhere_is_found(file: Path) -> None:
    content = file.read_bytes()
    for at in range(0, len(content), 31):
        damaged = bytearray(content)
        damaged[at] ^= 0x01
        file.write_bytes(damaged)
        try:
            check(file)
        except Invalid:
            continue
        assert content[at : at + 1] in b"\0 ", f"byte {at}: only padding may differ"


def members(change: Callable[[list[tuple[tarfile.TarInfo, bytes]]], None]) -> bytes:
    """The archive with other members, as a tar program would write them."""
    found: list[tuple[tarfile.TarInfo, bytes]] = []
    with tarfile.open(fileobj=io.BytesIO(pack(a_manifest()))) as archive:
        for member in archive.getmembers():
            file = archive.extractfile(member)
            found.append((member, file.read() if file is not None else b""))
    change(found)
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for member, content in found:
            archive.addfile(member, io.BytesIO(content))
    return packed.getvalue()


def renamed(name: str) -> Callable[[list[tuple[tarfile.TarInfo, bytes]]], None]:
    def change(found: list[tuple[tarfile.TarInfo, bytes]]) -> None:
        found[1][0].name = name

    return change


def of_type(kind: bytes) -> Callable[[list[tuple[tarfile.TarInfo, bytes]]], None]:
    def change(found: list[tuple[tarfile.TarInfo, bytes]]) -> None:
        member = found[1][0]
        member.type, member.linkname, member.size = kind, "/etc/passwd", 0
        found[1] = (member, b"")

    return change


def one_more(found: list[tuple[tarfile.TarInfo, bytes]]) -> None:
    found.append((tarfile.TarInfo("blobs/sha256/" + "0" * 64), b""))


@pytest.mark.parametrize(
    "change",
    [
        renamed("../../etc/cron.d/x"),
        renamed("/etc/passwd"),
        renamed("blobs/sha256/" + "0" * 64),
        renamed("x" * 300),
        of_type(tarfile.SYMTYPE),
        of_type(tarfile.LNKTYPE),
        of_type(tarfile.CHRTYPE),
        of_type(tarfile.DIRTYPE),
        one_more,
        lambda found: found.reverse(),
        lambda found: found.pop(1) and None,
        lambda found: found.append(found[1]),
    ],
)
def test_other_members_are_refused(
    change: Callable[[list[tuple[tarfile.TarInfo, bytes]]], None], tmp_path: Path
) -> None:
    path = tmp_path / "bad.bundle"
    path.write_bytes(members(change))
    with pytest.raises(Invalid):
        open_archive(path)


def test_what_is_no_bundle(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match="cannot be read"):
        open_archive(tmp_path / "nothing")
    path = tmp_path / "text"
    path.write_text("hello " * 1000)
    with pytest.raises(Invalid, match="is no bundle"):
        open_archive(path)
