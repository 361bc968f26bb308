"""Seals a stream with a passphrase, so that its reader finds every change: scrypt, then ChaCha20-Poly1305 by chunk.

Each chunk is sealed under its number and a mark for the last one (the STREAM construction), and with the header of the
file. So a chunk that was changed, moved, repeated or cut off cannot be opened. The key is used for one file: its salt
is random. A stream without a passphrase ends with the SHA-256 of the file: that finds damage, not a forger.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import IO, Any, Protocol

from corral.kit.errors import Denied, Invalid

CHUNK_BYTES = 64 * 1024
_TAG_BYTES = 16
_SUM_BYTES = 32
_MAX_MEMORY = 1 << 30  # of scrypt: a header from elsewhere must not take all of a machine
DAMAGED = "the backup is damaged or incomplete: use another copy of it"


@dataclass(frozen=True)
class Seal:
    """How the key is made of the passphrase. It is in the header; `check` tells a wrong passphrase from damage."""

    salt: str = field(default_factory=lambda: os.urandom(16).hex())
    n: int = 2**17
    r: int = 8
    p: int = 1
    check: str = ""
    method: str = "scrypt+chacha20-poly1305"

    def as_data(self) -> dict[str, Any]:
        return asdict(self)


class Writer(Protocol):
    def write(self, data: bytes, /) -> int: ...
    def flush(self) -> None: ...
    def finish(self) -> None: ...


class Reader(Protocol):
    def read(self, size: int = -1, /) -> bytes: ...
    def finish(self) -> None:
        """Read to the end. Raises `Invalid` if anything of the stream was changed."""


def make_key(passphrase: str, seal: Seal) -> tuple[bytes, str]:
    """The key, and the `check` that belongs to it. Takes a fraction of a second on purpose."""
    if seal.method != Seal.method:
        raise Invalid(f"the backup is sealed with {seal.method!r}, which this corral does not know: upgrade corral")
    memory = 128 * seal.n * seal.r * seal.p
    if seal.n < 2 or seal.n & (seal.n - 1) or min(seal.r, seal.p) < 1 or memory > _MAX_MEMORY:
        raise Invalid(DAMAGED)
    made = hashlib.scrypt(
        passphrase.encode(),
        salt=_from_hex(seal.salt),
        n=seal.n,
        r=seal.r,
        p=seal.p,
        maxmem=memory + (32 << 20),
        dklen=48,
    )
    return made[:32], made[32:].hex()


def open_key(passphrase: str, seal: Seal) -> bytes:
    """Raises `Denied` for the wrong passphrase."""
    key, check = make_key(passphrase, seal)
    if not hmac.compare_digest(check, seal.check):
        raise Denied("the passphrase is not the one of this backup")
    return key


class SealingWriter:
    def __init__(self, file: IO[bytes], key: bytes, header: bytes) -> None:
        self._file = file
        self._seal = _chunk_cipher(key, header)[0]
        self._waiting = bytearray()
        self._number = 0

    def write(self, data: bytes, /) -> int:
        self._waiting += data
        while len(self._waiting) > CHUNK_BYTES:  # the last chunk is marked, so one always waits
            self._write_chunk(bytes(self._waiting[:CHUNK_BYTES]), is_last=False)
            del self._waiting[:CHUNK_BYTES]
        return len(data)

    def flush(self) -> None:
        """Chunks are written when they are full."""

    def finish(self) -> None:
        self._write_chunk(bytes(self._waiting), is_last=True)

    def _write_chunk(self, chunk: bytes, *, is_last: bool) -> None:
        self._file.write(self._seal(_nonce(self._number, is_last), chunk))
        self._number += 1


class UnsealingReader:
    def __init__(self, file: IO[bytes], key: bytes, header: bytes) -> None:
        self._file = file
        self._open = _chunk_cipher(key, header)[1]
        self._next = file.read(CHUNK_BYTES + _TAG_BYTES)
        self._buffer = b""
        self._number = 0
        self._ended = False

    def read(self, size: int = -1, /) -> bytes:
        while not self._ended and (size < 0 or len(self._buffer) < size):
            self._buffer += self._read_chunk()
        taken = self._buffer if size < 0 else self._buffer[:size]
        self._buffer = self._buffer[len(taken) :]
        return taken

    def finish(self) -> None:
        while not self._ended:
            self._read_chunk()

    def _read_chunk(self) -> bytes:
        from cryptography.exceptions import InvalidTag

        chunk, self._next = self._next, self._file.read(CHUNK_BYTES + _TAG_BYTES)
        self._ended = not self._next
        try:
            opened = self._open(_nonce(self._number, self._ended), chunk)
        except (InvalidTag, ValueError) as error:
            raise Invalid(DAMAGED) from error
        self._number += 1
        return opened


class SummingWriter:
    """Writes a stream that is not sealed."""

    def __init__(self, file: IO[bytes], header: bytes) -> None:
        self._file = file
        self._sum = hashlib.sha256(header)

    def write(self, data: bytes, /) -> int:
        self._sum.update(data)
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()

    def finish(self) -> None:
        self._file.write(self._sum.digest())


class SummingReader:
    def __init__(self, file: IO[bytes], header: bytes) -> None:
        self._file = file
        self._sum = hashlib.sha256(header)
        self._tail = file.read(_SUM_BYTES)  # the sum, once the end is reached

    def read(self, size: int = -1, /) -> bytes:
        taken = self._file.read(size)
        data = self._tail + taken
        self._tail = data[-_SUM_BYTES:] if len(data) >= _SUM_BYTES else data
        data = data[: len(data) - len(self._tail)]
        self._sum.update(data)
        return data

    def finish(self) -> None:
        while self.read(CHUNK_BYTES):
            pass
        if self._tail != self._sum.digest():
            raise Invalid(DAMAGED)


_Crypt = Callable[[bytes, bytes], bytes]


def _chunk_cipher(key: bytes, header: bytes) -> tuple[_Crypt, _Crypt]:
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

    cipher = ChaCha20Poly1305(key)

    def seal(nonce: bytes, chunk: bytes) -> bytes:
        return cipher.encrypt(nonce, chunk, header)

    def open_(nonce: bytes, chunk: bytes) -> bytes:
        return cipher.decrypt(nonce, chunk, header)

    return seal, open_


def _nonce(number: int, is_last: bool) -> bytes:
    return number.to_bytes(11, "big") + bytes([is_last])


def _from_hex(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError as error:
        raise Invalid(DAMAGED) from error
