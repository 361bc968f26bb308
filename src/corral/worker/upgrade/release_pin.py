"""The release key that this worker trusts, and the highest counter that it has accepted: `release.json` of the data
folder (docs/adr/0048-a-fleet-upgrades-itself.md).

The first key that the controller names at a registration is kept. Another key is followed only with the signature of
the one before it, or when the person who runs the worker names it with `--release-key`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from corral.contract.codec import Message, Undecodable, decode, encode
from corral.contract.releases import KEY_DOMAIN, MAX_SIGNED_LENGTH, RELEASE_DOMAIN, ReleaseKeyChange, ReleaseOrder
from corral.kit.errors import Denied, Failed
from corral.kit.files import write_atomically
from corral.kit.log import get_log
from corral.kit.signing import BadSignature, Verifier

log = get_log(__name__)

FILE = "release.json"
MAX_CHANGES = 1000


class Pin(Message, frozen=True):
    key: str = ""  # public; empty: none is known
    counter: int = 0
    sha256: str = ""  # of the release with this counter


def follow(pin: Pin, offered: str, changes: Sequence[str]) -> Pin:
    """The pin after a registration that names the key `offered` and the changes that lead to it. Pure."""
    if not offered or offered == pin.key:
        return pin
    if not pin.key:
        return replace(pin, key=offered)
    key = pin.key
    for text in changes[:MAX_CHANGES]:
        change = _read_change(text, key)
        if change is not None and change.previous == key:
            key = change.next
    return replace(pin, key=key) if key == offered else pin


def check_order(pin: Pin, signed: str) -> ReleaseOrder:
    """The order, if this worker may carry it out. Raises Denied."""
    if not pin.key:
        raise Denied("this worker knows no release key yet: it learns it at its next registration")
    if len(signed) > MAX_SIGNED_LENGTH:
        raise Denied("the order is too long to be a release")
    try:
        order = decode(ReleaseOrder, Verifier(pin.key).verify(signed, domain=RELEASE_DOMAIN))
    except (BadSignature, Undecodable) as error:
        raise Denied(
            f"the release was not signed by the key that this worker trusts ({pin.key}): if the key has just been "
            "replaced, start the worker again, or wait until it renews its credentials, then retry the operation; if "
            "the key before was lost, start it once with --release-key and the new key"
        ) from error
    if order.counter < pin.counter:
        raise Denied(
            f"the release has the counter {order.counter}, and this worker has accepted {pin.counter}: an older order "
            "is not repeated; to go back to an older version, sign it again with a higher counter"
        )
    if order.counter == pin.counter and order.sha256 != pin.sha256:
        raise Denied(f"another release with the counter {order.counter} was accepted before: sign with a higher one")
    return order


def _read_change(text: str, key: str) -> ReleaseKeyChange | None:
    try:
        return decode(ReleaseKeyChange, Verifier(key).verify(text, domain=KEY_DOMAIN))
    except (BadSignature, Undecodable):
        return None


class ReleasePin:
    """The file. Blocking; only the worker that holds the folder writes it."""

    def __init__(self, data: Path, *, chosen_key: str = "") -> None:
        """`chosen_key`: of `--release-key`."""
        self._path = data / FILE
        self._chosen_key = chosen_key

    def read(self) -> Pin:
        """Raises Failed: a damaged file must not pass for a worker that trusts whoever comes first."""
        stored = self._stored()
        if self._chosen_key and self._chosen_key != stored.key:
            return Pin(self._chosen_key)
        return stored

    def _stored(self) -> Pin:
        try:
            return decode(Pin, self._path.read_bytes())
        except FileNotFoundError:
            return Pin()
        except (OSError, Undecodable) as error:
            raise Failed(
                f"{self._path} cannot be read ({error}): remove it and name the key with --release-key"
            ) from error

    def learn(self, offered: str, changes: Sequence[str]) -> None:
        """After a registration."""
        try:
            after = self.read() if self._chosen_key else follow(self._stored(), offered, changes)
            if after != self._stored():
                self._write(after)
                log.info("release key trusted", key=after.key)
            if offered and offered != after.key:
                log.warning("the controller names a release key that this worker does not trust", key=offered)
        except Failed as error:
            log.error("release key not stored", reason=error.message)

    def accept(self, order: ReleaseOrder) -> None:
        """From now on no older order is accepted. Raises Failed."""
        pin = self.read()
        if (pin.counter, pin.sha256) != (order.counter, order.sha256):
            self._write(replace(pin, counter=order.counter, sha256=order.sha256))

    def _write(self, pin: Pin) -> None:
        try:
            write_atomically(self._path, encode(pin), mode=0o600)
        except OSError as error:
            raise Failed(f"{self._path} cannot be written: {error.strerror or error}") from error
