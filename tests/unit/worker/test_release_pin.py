"""Which releases a worker accepts: by the key that it has pinned, in the order of the counter."""

from __future__ import annotations

from pathlib import Path

import pytest

from corral.contract.codec import encode
from corral.contract.releases import ReleaseKeyChange, ReleaseOrder
from corral.kit.errors import Denied, Failed
from corral.kit.signing import Signer
from corral.worker.upgrade.release_pin import Pin, ReleasePin, check_order, follow

OLD, NEW, NEWEST = (Signer(Signer.new_private_key()) for _ in range(3))
DOMAIN = b"corral release 1\n"  # the wire's literal
KEY_DOMAIN = b"corral release key 1\n"


def signed(counter: int, sha256: str = "a" * 64, *, by: Signer = OLD, domain: bytes = DOMAIN) -> str:
    return by.sign(encode(ReleaseOrder(counter, "1.2.0", sha256, 1000)), domain=domain)


def change(before: Signer, after: Signer, *, by: Signer | None = None, domain: bytes = KEY_DOMAIN) -> str:
    return (by or before).sign(encode(ReleaseKeyChange(before.public_key, after.public_key)), domain=domain)


def test_a_release_of_the_pinned_key_is_accepted_and_may_be_repeated() -> None:
    pin = Pin(OLD.public_key, 4, "b" * 64)
    order = check_order(pin, signed(5))
    assert (order.counter, order.version, order.sha256, order.size_bytes) == (5, "1.2.0", "a" * 64, 1000)
    assert check_order(Pin(OLD.public_key, 5, "a" * 64), signed(5)) == order


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (signed(5, by=NEW), "not signed by the key"),
        (signed(5, domain=b""), "not signed by the key"),  # any other text that the key signs
        (signed(5, domain=KEY_DOMAIN), "not signed by the key"),
        (signed(5)[:-2] + "AA", "not signed by the key"),
        ("nonsense", "not signed by the key"),
        ("", "not signed by the key"),
        ("x" * 5000, "too long"),
        (signed(3), "has the counter 3, and this worker has accepted 4"),
        (signed(4), "another release with the counter 4"),
    ],
)
def test_other_texts_and_older_releases_are_refused(text: str, reason: str) -> None:
    with pytest.raises(Denied, match=reason):
        check_order(Pin(OLD.public_key, 4, "b" * 64), text)


def test_going_back_is_a_new_order_with_a_higher_counter() -> None:
    pin = Pin(OLD.public_key, 5, "a" * 64)
    with pytest.raises(Denied):
        check_order(pin, signed(4, "b" * 64))
    assert check_order(pin, signed(6, "b" * 64)).sha256 == "b" * 64


def test_without_a_key_nothing_is_accepted() -> None:
    with pytest.raises(Denied, match="knows no release key yet"):
        check_order(Pin(), signed(1))


def test_the_first_key_is_kept_and_another_needs_its_signature() -> None:
    pin = follow(Pin(), OLD.public_key, ())
    assert pin == Pin(OLD.public_key)
    assert follow(pin, NEW.public_key, ()) == pin
    assert follow(pin, NEW.public_key, (change(OLD, NEW, by=NEW),)) == pin, "signed by itself"
    assert follow(pin, NEW.public_key, (change(OLD, NEW, domain=DOMAIN),)) == pin
    assert follow(pin, NEW.public_key, (change(OLD, NEWEST),)) == pin, "it leads to another key"
    assert follow(pin, NEW.public_key, ("nonsense", change(OLD, NEW))) == Pin(NEW.public_key)


def test_a_worker_that_missed_a_change_follows_both_and_keeps_its_counter() -> None:
    changes = (change(OLD, NEW), change(NEW, NEWEST))
    pin = Pin(OLD.public_key, 7, "a" * 64)
    assert follow(pin, NEWEST.public_key, changes) == Pin(NEWEST.public_key, 7, "a" * 64)
    assert follow(Pin(NEW.public_key, 7), NEWEST.public_key, changes).key == NEWEST.public_key


def test_the_file_keeps_key_and_counter(tmp_path: Path) -> None:
    pin = ReleasePin(tmp_path)
    pin.learn(OLD.public_key, ())
    pin.accept(check_order(pin.read(), signed(3)))
    again = ReleasePin(tmp_path)
    assert again.read() == Pin(OLD.public_key, 3, "a" * 64)
    again.learn(NEW.public_key, ())
    assert again.read().key == OLD.public_key
    again.learn(NEW.public_key, (change(OLD, NEW),))
    assert again.read() == Pin(NEW.public_key, 3, "a" * 64)
    assert (tmp_path / "release.json").stat().st_mode & 0o077 == 0


def test_a_person_chooses_another_key(tmp_path: Path) -> None:
    ReleasePin(tmp_path).learn(OLD.public_key, ())
    chosen = ReleasePin(tmp_path, chosen_key=NEW.public_key)
    chosen.learn(OLD.public_key, ())
    assert check_order(chosen.read(), signed(1, by=NEW)).counter == 1
    assert ReleasePin(tmp_path).read().key == NEW.public_key, "also without the option"


def test_a_damaged_file_trusts_nobody(tmp_path: Path) -> None:
    (tmp_path / "release.json").write_text("{")
    pin = ReleasePin(tmp_path)
    with pytest.raises(Failed, match="cannot be read"):
        pin.read()
    pin.learn(OLD.public_key, ())
    assert (tmp_path / "release.json").read_text() == "{"
