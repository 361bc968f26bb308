from __future__ import annotations

import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.kit.files import make_folder, make_private_folder, read_text, write_atomically, write_secret
from corral.kit.secrets import API_KEY, digest, matches, new_secret
from corral.kit.signing import BadSignature, Signer, Verifier

SIGNER = Signer(Signer.new_private_key())
VERIFIER = Verifier(SIGNER.public_key)


def test_secrets_are_long_random_and_recognisable() -> None:
    secrets = {new_secret(API_KEY) for _ in range(100)}
    assert len(secrets) == 100
    assert all(secret.startswith("ck_") and len(secret) == 3 + 52 for secret in secrets)
    secret = secrets.pop()
    assert matches(secret, digest(secret))
    assert not matches(secret + "a", digest(secret))


@given(st.binary(max_size=300))
def test_what_was_signed_is_read_back(claims: bytes) -> None:
    assert VERIFIER.verify(SIGNER.sign(claims)) == claims


@given(st.text(max_size=200))
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(BadSignature):
        VERIFIER.verify(text)


@given(st.integers(min_value=0), st.integers(min_value=0, max_value=63))
def test_one_changed_character_is_noticed(place: int, other: int) -> None:
    token = SIGNER.sign(b'{"sub":"gateway"}')
    place %= len(token)
    letter = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"[other]
    changed = token[:place] + letter + token[place + 1 :]
    if changed == token:
        assert VERIFIER.verify(changed)
        return
    try:
        claims = VERIFIER.verify(changed)
    except BadSignature:
        return
    # base64 has spare bits in its last letter: another spelling of the very same bytes is no forgery.
    assert claims == b'{"sub":"gateway"}'


def test_another_key_does_not_verify() -> None:
    other = Signer(Signer.new_private_key())
    with pytest.raises(BadSignature):
        VERIFIER.verify(other.sign(b"x"))


def test_secret_files_are_private(tmp_path: Path) -> None:
    path = tmp_path / "secrets" / "admin.key"
    write_secret(path, "ck_x\n")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert read_text(path) == "ck_x"
    assert read_text(tmp_path / "none") is None


def test_a_folder_that_is_somebody_elses_is_not_closed_for_one_secret_in_it(tmp_path: Path) -> None:
    """`--admin-key-file /etc/corral.key`, run as root, must not make /etc private."""
    etc = tmp_path / "etc"
    etc.mkdir(mode=0o755)
    (etc / "passwd").write_text("root")
    write_secret(etc / "corral.key", "ck_x")
    assert stat.S_IMODE(etc.stat().st_mode) == 0o755
    assert stat.S_IMODE((etc / "corral.key").stat().st_mode) == 0o600
    make_folder(etc)
    assert stat.S_IMODE(etc.stat().st_mode) == 0o755
    empty = tmp_path / "empty"
    empty.mkdir(mode=0o755)
    make_folder(empty)
    assert stat.S_IMODE(empty.stat().st_mode) == 0o700


def test_an_open_folder_is_closed_again(tmp_path: Path) -> None:
    folder = tmp_path / "secrets"
    folder.mkdir(mode=0o755)
    make_private_folder(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_failed_write_leaves_the_old_content_and_no_litter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "identity.json"
    write_atomically(path, b"old")

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["identity.json"]
