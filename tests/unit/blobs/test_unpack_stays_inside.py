"""Whatever an archive says, nothing outside the folder is touched, and what is inside stays inside."""

from __future__ import annotations

import io
import os
import stat
import tempfile
import zipfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from corral.blobs.archives.entries import Bounds, Entry, EntryKind, UnpackCounter
from corral.blobs.archives.unpack import Unpacker
from corral.blobs.archives.zip import read_zip
from corral.blobs.disk import DiskSpace
from corral.blobs.errors import BadArchive

ROOM = DiskSpace(reserve_bytes=0)

# Few words, so that entries meet: the same name as folder, link, file and parent.
HOSTILE = st.lists(
    st.sampled_from(["a", "b", "..", ".", "", ".wh.a", ".wh..wh..opq", "outside", "canary"]), min_size=1, max_size=5
).map("/".join)
HOSTILE_NAMES = st.one_of(
    HOSTILE, HOSTILE.map(lambda path: "/" + path), st.sampled_from(["/", "..", "../outside/canary"])
)
HOSTILE_TARGETS = st.one_of(HOSTILE_NAMES, st.sampled_from(["/tmp", "a/../..", "b/../../outside", "../../outside"]))
# Each of these is harmless alone; whether they stay inside together is the question.
MILD_NAMES = st.lists(st.sampled_from(["a", "b", "c", "d"]), min_size=1, max_size=3).map("/".join)
MILD_NAMES_OF_LAYERS = st.one_of(MILD_NAMES, st.sampled_from([".wh.a", "a/.wh.b", "a/.wh..wh..opq", "b/.wh.a"]))
MILD_TARGETS = st.one_of(MILD_NAMES, st.sampled_from([".", "a/..", "a/../b", "b/../c/..", "../a", "./b", "c/../../d"]))
MODES = st.sampled_from([0o644, 0o755, 0o4755, 0o2755, 0o1777, 0o000, 0o777])


@st.composite
def entries(draw: st.DrawFn, names: st.SearchStrategy[str], targets: st.SearchStrategy[str]) -> Entry:
    kind = draw(
        st.sampled_from([EntryKind.FILE, EntryKind.FOLDER, EntryKind.SYMLINK, EntryKind.SYMLINK, EntryKind.HARD_LINK])
    )
    data = draw(st.binary(max_size=5)) if kind is EntryKind.FILE else b""
    target = draw(targets) if kind in (EntryKind.SYMLINK, EntryKind.HARD_LINK) else ""
    return Entry(draw(names), kind, len(data), draw(MODES), 1.0, target, [data])


HOSTILE_ENTRIES = entries(HOSTILE_NAMES, HOSTILE_TARGETS)
MILD_ENTRIES = entries(MILD_NAMES_OF_LAYERS, MILD_TARGETS)
LAYERS = st.one_of(
    st.lists(st.lists(HOSTILE_ENTRIES, max_size=6), min_size=1, max_size=2),
    st.lists(st.lists(MILD_ENTRIES, max_size=8), min_size=1, max_size=3),
)


def snapshot(folder: Path) -> dict[str, tuple[object, ...]]:
    found: dict[str, tuple[object, ...]] = {}
    for path in sorted(folder.rglob("*")):
        about = path.lstat()
        content = path.read_bytes() if stat.S_ISREG(about.st_mode) else os.readlink(path) if path.is_symlink() else ""
        found[str(path)] = (about.st_mode, about.st_mtime_ns if path.is_file() else 0, about.st_nlink, content)
    return found


def make_outside(root: Path) -> Path:
    outside = root / "outside"
    (outside / "deep").mkdir(parents=True)
    (outside / "canary").write_text("untouched")
    (outside / "deep" / "canary").write_text("untouched")
    (outside / "link").symlink_to("canary")
    return outside


def check_inside(folder: Path) -> None:
    root = os.path.realpath(folder)
    for path in folder.rglob("*"):
        about = path.lstat()
        if path.is_symlink():
            assert f"{os.path.realpath(path)}/".startswith(f"{root}/"), f"{path} -> {os.readlink(path)}"
            assert not os.readlink(path).startswith("/")
        else:
            assert stat.S_ISREG(about.st_mode) or stat.S_ISDIR(about.st_mode)
            assert not about.st_mode & 0o7022, f"{path} has mode {about.st_mode:o}"
            assert about.st_mode & 0o600 == 0o600


@settings(max_examples=500)
@given(LAYERS, st.booleans())
def test_entries_in_layers(layers: list[list[Entry]], rootfs: bool) -> None:
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        before = snapshot(make_outside(root))
        target = root / "target"
        target.mkdir()
        unpacker = Unpacker(target, UnpackCounter(Bounds(), 10**6), rootfs=rootfs, space=ROOM)
        try:
            for layer in layers:
                unpacker.add(layer)
            unpacker.finish()
        except BadArchive:
            pass
        else:
            check_inside(target)
        assert snapshot(root / "outside") == before
        assert sorted(path.name for path in root.iterdir()) == ["outside", "target"]


@settings(max_examples=150)
@given(st.one_of(st.lists(HOSTILE_ENTRIES, max_size=8), st.lists(MILD_ENTRIES, max_size=12)))
def test_zip_archives(members: list[Entry]) -> None:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        written: set[str] = set()
        for member in members:
            if member.kind is EntryKind.HARD_LINK or member.name in written or not member.name:
                continue
            written.add(member.name)
            info = zipfile.ZipInfo(member.name + ("/" if member.kind is EntryKind.FOLDER else ""))
            info.create_system = 3
            info.external_attr = ((stat.S_IFLNK if member.kind is EntryKind.SYMLINK else 0) | member.mode) << 16
            archive.writestr(
                info, member.target if member.kind is EntryKind.SYMLINK else b"".join(map(bytes, member.data))
            )
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        before = snapshot(make_outside(root))
        target = root / "target"
        target.mkdir()
        unpacker = Unpacker(target, UnpackCounter(Bounds(), 10**6), space=ROOM)
        try:
            unpacker.add(read_zip(packed))
            unpacker.finish()
        except BadArchive:
            pass
        else:
            check_inside(target)
        assert snapshot(root / "outside") == before
        assert sorted(path.name for path in root.iterdir()) == ["outside", "target"]
