"""The file of a backup: what was written comes back, and nothing else is taken for one."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from corral.cli.backup.archive import CONTENTS, MAGIC, BackupFile, BackupHeader, Contents, Source, is_safe, write_backup
from corral.cli.backup.parts import is_known
from corral.cli.backup.seal import Seal
from corral.kit.errors import Denied, Invalid

CHEAP = Seal(n=2**10)
PASSPHRASE = "four words or more"
HEADER = BackupHeader(
    id="b1",
    created_at=datetime(2026, 1, 2, tzinfo=UTC),
    corral="0.1.0",
    schema="0001",
    store="sqlite",
    host="attic",
    machine="m",
    has_secrets=True,
)
PARTS = {"store.db": b"rows" * 50, "data/secrets/admin.key": b"ck_secret", "data/ports.json": b"{}"}


def written(*, passphrase: str | None, parts: dict[str, bytes] | None = None) -> bytes:
    file = io.BytesIO()
    write_backup(file, HEADER, PARTS if parts is None else parts, passphrase=passphrase, seal=CHEAP)
    return file.getvalue()


def read(path: Path, stream: bytes, *, passphrase: str | None, folder: Path | None = None) -> Contents:
    path.write_bytes(stream)
    with BackupFile.open(path) as backup:
        if folder is None:
            return backup.verify(passphrase, is_known)
        return backup.extract(passphrase, is_known, folder)


@pytest.fixture(params=[None, PASSPHRASE], ids=["open", "sealed"])
def passphrase(request: pytest.FixtureRequest) -> str | None:
    return request.param  # type: ignore[no-any-return]


def test_what_was_written_comes_back(tmp_path: Path, passphrase: str | None) -> None:
    (tmp_path / "large").write_bytes(bytes(200_000))
    file = io.BytesIO()
    sources: dict[str, Source] = {**PARTS, "store.db": tmp_path / "large"}
    made = write_backup(file, HEADER, sources, passphrase=passphrase, seal=CHEAP)
    folder = tmp_path / "out"
    folder.mkdir()
    (tmp_path / "b").write_bytes(file.getvalue())
    with BackupFile.open(tmp_path / "b") as backup:
        assert backup.header.host == "attic"
        assert backup.is_sealed == (passphrase is not None)
        assert backup.verify(passphrase, is_known) == made
        assert list(folder.iterdir()) == []
        assert backup.extract(passphrase, is_known, folder) == made  # after the look, from the start again
    assert (folder / "store.db").read_bytes() == bytes(200_000)
    assert (folder / "data/secrets/admin.key").read_bytes() == b"ck_secret"
    assert (folder / "data/secrets/admin.key").stat().st_mode & 0o777 == 0o600
    assert (b"ck_secret" in gunzipped(file.getvalue())) == (passphrase is None)


def gunzipped(stream: bytes) -> bytes:
    body = stream.split(b"\n", 2)[2]
    return gzip.decompress(body[:-32]) if body.startswith(b"\x1f\x8b") else body


def test_damage_at_any_byte_is_found(tmp_path: Path, passphrase: str | None) -> None:
    stream = written(passphrase=passphrase)
    path = tmp_path / "b"
    for at in range(len(stream)):
        changed = bytearray(stream)
        changed[at] ^= 1 << (at % 8)
        with pytest.raises((Invalid, Denied)):
            read(path, bytes(changed), passphrase=passphrase)


def test_a_file_cut_off_at_any_byte_is_refused(tmp_path: Path, passphrase: str | None) -> None:
    stream = written(passphrase=passphrase)
    for kept in range(len(stream)):
        with pytest.raises(Invalid):
            read(tmp_path / "b", stream[:kept], passphrase=passphrase)
    with pytest.raises(Invalid):
        read(tmp_path / "b", stream + b"\0", passphrase=passphrase)


def test_the_passphrase(tmp_path: Path) -> None:
    stream = written(passphrase=PASSPHRASE)
    with pytest.raises(Denied, match="not the one of this backup"):
        read(tmp_path / "b", stream, passphrase="another passphrase")
    with pytest.raises(Denied, match="give its passphrase"):
        read(tmp_path / "b", stream, passphrase=None)


def forged(members: list[tuple[str, bytes]], *, kind: bytes = tarfile.REGTYPE, contents: Any = None) -> bytes:
    """An unsealed file with right sums, as somebody else may write it."""
    first = written(passphrase=None).split(b"\n", 2)
    head = b"\n".join(first[:2]) + b"\n"
    packed = io.BytesIO()
    listed = [
        {"name": name, "size_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in members
    ]
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for name, data in ((CONTENTS, json.dumps(contents or {"members": listed}).encode()), *members):
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            if name != CONTENTS:
                entry.type = kind
                entry.linkname = "/etc/passwd"
            tar.addfile(entry, io.BytesIO(data))
    whole = head + packed.getvalue()
    return whole + hashlib.sha256(whole).digest()


@pytest.mark.parametrize(
    "name",
    [
        *("../escape", "/etc/cron.d/x", "data/../../x", "data/secrets/bus/../../../x", "data//ports.json", "data/."),
        *("evil/data/ports.json", "data/worker/lock", "data/ports.json/x", "ports.json", "data/lock", "x"),
        *("data/controller/models/a/b.yaml", "data/controller/models/run.sh"),
    ],
)
def test_members_without_a_place_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(Invalid, match="does not know"):
        read(tmp_path / "b", forged([(name, b"x")]), passphrase=None, folder=tmp_path)
    assert [each.name for each in tmp_path.iterdir()] == ["b"]


def test_links_and_folders_are_refused(tmp_path: Path) -> None:
    for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE):
        with pytest.raises(Invalid):
            read(tmp_path / "b", forged([("store.db", b"")], kind=kind), passphrase=None, folder=tmp_path)
    assert [each.name for each in tmp_path.iterdir()] == ["b"]


def test_members_that_are_not_as_listed_are_refused(tmp_path: Path) -> None:
    wrong = {"name": "store.db", "size_bytes": 1, "sha256": "0" * 64}
    cases: list[dict[str, Any]] = [
        {"members": [wrong]},
        {"members": [{**wrong, "size_bytes": 2}]},
        {"members": []},
        {"members": [wrong, {**wrong, "name": "data/ports.json"}]},
        {"other": 1},
    ]
    for contents in cases:
        with pytest.raises(Invalid):
            read(tmp_path / "b", forged([("store.db", b"x")], contents=contents), passphrase=None)


def test_files_that_are_no_backup(tmp_path: Path) -> None:
    for text in (b"", b"corral", b"SQLite format 3\0", MAGIC, MAGIC + b"{}\n", MAGIC + b"\xff\n", MAGIC + b"[1]\n"):
        with pytest.raises(Invalid):
            read(tmp_path / "b", text, passphrase=None)
    with pytest.raises(Invalid, match="is not a file"), BackupFile.open(Path("/dev/null")):
        pass
    with pytest.raises(Invalid, match="cannot be read"), BackupFile.open(tmp_path / "none"):
        pass


def test_a_newer_format_says_so(tmp_path: Path) -> None:
    stream = written(passphrase=None).replace(b'{"format":1,', b'{"format":2,', 1)
    with pytest.raises(Invalid, match="newer Corral"):
        read(tmp_path / "b", stream, passphrase=None)


def test_names() -> None:
    assert is_safe("data/secrets/admin.key")
    assert not any(map(is_safe, ("", ".", "..", "/x", "a/../b", "a//b", "./a", "a/", "a\0b")))
