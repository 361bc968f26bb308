"""Keys of files stay in their folders, whatever they are made of."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.kit.errors import Invalid
from corral.worker.localai.file_keys import (
    FileFolders,
    clean_route,
    decode_route,
    is_in_any,
    is_inside,
    list_files,
    quote_route,
    resolve_key,
    resolve_prefix,
)

PARTS = st.sampled_from(
    ["..", ".", "", "a", "models", "data", ".blobs", "out", "loop", "%2e%2e", "ü", "a b", "\x00", "\n"]
)
KEYS = st.one_of(st.lists(PARTS, max_size=8).map("/".join), st.text(max_size=30))


@pytest.fixture
def folders(tmp_path: Path) -> FileFolders:
    return make_folders(tmp_path)


def make_folders(root: Path) -> FileFolders:
    folders = FileFolders.beside(root / "models")
    for folder in (folders.models, folders.staging, folders.cache):
        folder.mkdir(parents=True, exist_ok=True)
        for name, target in (("out", "/etc"), ("loop", "loop"), ("in", "a")):
            if not (folder / name).is_symlink():
                (folder / name).symlink_to(target)
    return folders


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("models/m/w.gguf", "models/m/w.gguf"),
        ("data/x/y", "data/x/y"),
        ("ephemeral/inputs/1/a.wav", "staging/ephemeral/inputs/1/a.wav"),
        ("models", "staging/models"),
        ("modelsx/y", "staging/modelsx/y"),
        ("models/", "models"),
        ("models/in/w", "models/a/w"),
        ("models//etc/passwd", "models/etc/passwd"),
        ("a b/ü#?%.bin", "staging/a b/ü#?%.bin"),
    ],
)
def test_a_key_leads_into_a_folder(folders: FileFolders, key: str, expected: str) -> None:
    assert resolve_key(folders, key) == folders.models.parent / expected


@pytest.mark.parametrize(
    "key",
    [
        "../x",
        "models/../../x",
        "models/../staging/x",
        "models/out/passwd",
        "out/passwd",
        "models/.blobs/x",
        "models/in/../.blobs/x",
        "models/m/.corral-upload-1",
        "data/../models/w",
    ],
)
def test_a_key_that_leaves_its_folder_is_refused(folders: FileFolders, key: str) -> None:
    with pytest.raises(Invalid, match="outside allowed directory"):
        resolve_key(folders, key)


@pytest.mark.parametrize("key", ["", "a\0b", "models/a\nb", "a\x7f"])
def test_a_key_that_is_no_key(folders: FileFolders, key: str) -> None:
    with pytest.raises(Invalid):
        resolve_key(folders, key)


def test_a_prefix_of_the_bus_leads_into_the_cache(folders: FileFolders) -> None:
    for prefix, expected in (
        ("models/m", "models/m"),
        ("models", "models"),
        ("data", "data"),
        ("ephemeral/fetch", "cache/ephemeral/fetch"),
        ("", "cache"),
    ):
        assert resolve_prefix(folders, prefix) == folders.models.parent / expected
    with pytest.raises(Invalid):
        resolve_prefix(folders, "models/../../x")


def test_the_same_beginning_is_not_inside(tmp_path: Path) -> None:
    assert is_inside("/m/models", "/m/models")
    assert is_inside("/m/models/x", "/m/models")
    assert not is_inside("/m/models-old/x", "/m/models")
    assert is_inside("/x", "/")
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "out").symlink_to("/etc")
    assert is_in_any(str(tmp_path / "models" / "x"), tmp_path / "models")
    assert not is_in_any(str(tmp_path / "models" / "out" / "passwd"), tmp_path / "models")
    assert not is_in_any("models/x", tmp_path / "models")
    assert not is_in_any("/x\0", Path("/"))


@given(key=KEYS)
def test_no_key_leaves_its_folder(tmp_path_factory: pytest.TempPathFactory, key: str) -> None:
    folders = make_folders(tmp_path_factory.getbasetemp() / "keys")
    for resolve in (resolve_key, resolve_prefix):
        try:
            path = resolve(folders, key)
        except (Invalid, OSError, UnicodeEncodeError):
            continue
        real = os.path.realpath(path)
        around = os.path.realpath(folders.models.parent)
        assert any(is_inside(real, f"{around}/{name}") for name in ("models", "staging", "data", "cache"))
        assert ".blobs" not in Path(real).relative_to(around).parts[1:2]
        os.fsencode(path).decode("latin-1").encode()  # a header can have it
        assert not any(character in str(path) for character in "\r\n\0")


@given(st.binary(max_size=40))
def test_every_route_is_decoded(raw: bytes) -> None:
    decoded = decode_route(b"/v1/files/" + raw)
    clean = clean_route(decoded)
    assert clean.startswith("/")
    assert "//" not in clean
    assert ".." not in clean.split("/")
    assert clean_route(clean) == clean
    assert decode_route(quote_route(clean)) == clean


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20))
def test_an_encoded_key_and_an_unencoded_one_are_the_same(key: str) -> None:
    assert decode_route(f"/v1/files/{quote(key)}".encode()) == f"/v1/files/{key}"
    if "%" not in key:
        assert decode_route(f"/v1/files/{key}".encode()) == f"/v1/files/{key}"


def test_a_list_shows_files_and_hides_what_is_corrals(tmp_path: Path) -> None:
    for name in ("b/c.bin", "b/c.bin.sha256", "a.txt", ".blobs/x", "b/.corral-upload-12", "b/.corral-upload-12.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    (tmp_path / "linked").symlink_to(tmp_path / "b")
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "loop").symlink_to("loop")
    os.mkfifo(tmp_path / "pipe")
    with open(os.path.join(os.fsencode(tmp_path), b"\xff"), "w"):
        pass
    assert list_files(tmp_path) == ["a.txt", "b/c.bin", "b/c.bin.sha256"]
    assert list_files(tmp_path / "none") == []


def test_entries_that_cannot_be_read_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("open/a", "closed/b"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("x")
    scan = os.scandir

    def refuse(path: str) -> object:
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied")
        return scan(path)

    monkeypatch.setattr("corral.worker.localai.file_keys.os.scandir", refuse)
    assert list_files(tmp_path) == ["open/a"]
