"""Reads tar streams: ustar, GNU and pax. Reads forward only, and keeps nothing in memory.

The standard library's reader is made for seekable files: on a compressed stream it takes ten times as long as
unpacking. This reader supports what software archives contain, and refuses everything else.
"""

from __future__ import annotations

from collections.abc import Iterator

from corral.blobs.archives.entries import Entry, EntryKind
from corral.blobs.errors import BadArchive, UnsafeArchive

RECORD = 512
MAX_EXTENDED_BYTES = 1 << 20  # pax headers and long names; ordinary ones have a few hundred bytes
ZEROS = bytes(RECORD)

_KINDS = {
    b"0": EntryKind.FILE,
    b"\0": EntryKind.FILE,
    b"7": EntryKind.FILE,
    b"1": EntryKind.HARD_LINK,
    b"2": EntryKind.SYMLINK,
    b"5": EntryKind.FOLDER,
}
_FORBIDDEN = {b"3": "a character device", b"4": "a block device", b"6": "a named pipe"}


class Stream:
    """Reads any number of bytes from blocks of any size."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks = blocks
        self._block = memoryview(b"")
        self._at = 0

    def read(self, size: int) -> bytes:
        """Exactly `size` bytes; fewer at the end of the stream."""
        end = self._at + size
        if end <= len(self._block):
            piece = bytes(self._block[self._at : end])
            self._at = end
            return piece
        return b"".join(self.pieces(size))

    def pieces(self, size: int) -> Iterator[memoryview]:
        """The same bytes in pieces, without a copy."""
        while size > 0:
            if self._at >= len(self._block) and not self._next():
                return
            piece = self._block[self._at : self._at + size]
            self._at += len(piece)
            size -= len(piece)
            yield piece

    def _next(self) -> bool:
        block = next(self._blocks, None)
        self._block, self._at = memoryview(block or b""), 0
        return block is not None


def read_tar(blocks: Iterator[bytes]) -> Iterator[Entry]:
    """Entries in order. The data of an entry must be read before the next entry is requested; unread data is
    skipped."""
    stream = Stream(blocks)
    extended: dict[str, str] = {}
    common: dict[str, str] = {}
    while (header := stream.read(RECORD)) and header != ZEROS:
        if len(header) < RECORD:
            raise BadArchive("the archive ends in the middle of a header")
        _check_sum(header)
        size = _number(header[124:136])
        match kind := header[156:157]:
            case b"x":
                extended |= _read_pax(_read_extended(stream, size))
            case b"g":
                common |= _read_pax(_read_extended(stream, size))
            case b"L" | b"K":
                text = _text(_read_extended(stream, size))
                extended["path" if kind == b"L" else "linkpath"] = text
            case _:
                yield from _read_entry(header, common | extended, stream)
                extended = {}
    # What follows two empty records is padding.


def _read_entry(header: bytes, extended: dict[str, str], stream: Stream) -> Iterator[Entry]:
    entry = _entry(header, extended)
    data = _Data(stream, entry.size, entry.name)
    entry.data = data.pieces()
    yield entry
    data.skip()


class _Data:
    def __init__(self, stream: Stream, size: int, name: str) -> None:
        self._stream = stream
        self._left = size
        self._padding = -size % RECORD
        self._name = name

    def pieces(self) -> Iterator[memoryview]:
        for piece in self._stream.pieces(self._left):
            self._left -= len(piece)
            yield piece
        if self._left:
            raise BadArchive(f"the archive ends in the middle of {self._name[:200]!r}")

    def skip(self) -> None:
        for _ in self.pieces():
            pass
        if self._padding:
            self._stream.read(self._padding)


def _entry(header: bytes, extended: dict[str, str]) -> Entry:
    flag = header[156:157]
    name = extended["path"] if "path" in extended else _plain_name(header)
    if any(key.startswith("GNU.sparse.") for key in extended) or flag == b"S":
        raise BadArchive(f"{name[:200]!r} is a sparse file; pack it without --sparse")
    kind = _KINDS.get(flag)
    if kind is None:
        what = _FORBIDDEN.get(flag)
        if what is None:
            raise BadArchive(f"{name[:200]!r} has an unsupported type: {flag!r}")
        raise UnsafeArchive(f"{name[:200]!r} is {what}, which a backend must not contain")
    if kind is EntryKind.FILE and name.endswith("/"):
        kind = EntryKind.FOLDER  # in archives of before 1988
    return Entry(
        name,
        kind,
        # Some writers give links and folders a size, although no data follows.
        size=_size(header, extended) if kind is EntryKind.FILE else 0,
        mode=_number(header[100:108]) & 0o7777,
        modified_s=_modified(header, extended),
        target=(extended["linkpath"] if "linkpath" in extended else _text(header[157:257])),
    )


def _plain_name(header: bytes) -> str:
    name = _text(header[:100])
    # GNU tar uses the field of ustar's name prefix for other data.
    if header[257:263] == b"ustar\0" and (prefix := _text(header[345:500])):
        return f"{prefix}/{name}"
    return name


def _size(header: bytes, extended: dict[str, str]) -> int:
    text = extended.get("size")
    if text is None:
        return _number(header[124:136])
    if not text.isdecimal() or len(text) > 18:
        raise BadArchive(f"{text[:40]!r} is not a size")
    return int(text)


def _modified(header: bytes, extended: dict[str, str]) -> float:
    try:
        return float(extended["mtime"]) if "mtime" in extended else float(_number(header[136:148]))
    except (ValueError, BadArchive):
        return 0.0  # the time is not needed


def _read_extended(stream: Stream, size: int) -> bytes:
    if size > MAX_EXTENDED_BYTES:
        raise BadArchive(f"a header has {size} bytes")
    data = stream.read(size)
    stream.read(-size % RECORD)
    if len(data) < size:
        raise BadArchive("the archive ends in the middle of a header")
    return data


def _read_pax(data: bytes) -> dict[str, str]:
    """Records of `length key=value\\n`, the length counting itself."""
    found: dict[str, str] = {}
    at = 0
    while at < len(data) and data[at : at + 1] != b"\0":
        digits, space, _ = data[at : at + 20].partition(b" ")
        length = int(digits) if space and digits.isdigit() else 0
        record = data[at : at + length]
        key, equals, value = record[len(digits) + 1 : -1].partition(b"=")
        if not equals or not record.endswith(b"\n"):
            raise BadArchive("an extended header cannot be read")
        found[_decode(key)] = _decode(value)
        at += length
    return found


def _check_sum(header: bytes) -> None:
    said = header[148:156].split(b"\0", 1)[0].strip()
    if not said.isdigit() or f"{sum(header) - sum(header[148:156]) + 8 * 0x20:o}" != said.lstrip(b"0").decode():
        raise BadArchive("not a tar archive, or a damaged one")


def _number(field: bytes) -> int:
    if field[0] & 0x80:  # too large for octal digits: a binary number, two's complement
        if field[0] != 0x80:
            raise BadArchive("a header contains a negative number")
        return int.from_bytes(field[1:], "big")
    digits = field.split(b"\0", 1)[0].strip()
    try:
        return int(digits or b"0", 8)
    except ValueError as error:
        raise BadArchive("a header contains an invalid number") from error


def _text(field: bytes) -> str:
    return _decode(field.split(b"\0", 1)[0])


def _decode(data: bytes) -> str:
    # Names are bytes on Linux; bytes that are not UTF-8 survive the round trip.
    return data.decode("utf-8", "surrogateescape")
