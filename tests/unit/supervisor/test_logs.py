"""Reading a shim's log files while they grow and turn; the lines kept in memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from corral.worker.supervisor.logs import LogBook
from corral.worker.supervisor.tail import LogLine, LogTail, parse_line

NOON = "2026-11-15T12:00:00.000001Z"


def line(text: str, stream: str = "stdout", at: str = NOON) -> LogLine:
    return LogLine(timestamp=at, stream=stream, text=text)


def written(*texts: str) -> bytes:
    return b"".join(f"{NOON} stdout {text}\n".encode() for text in texts)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    (tmp_path / "log").mkdir()
    return tmp_path / "log"


def texts(tail: LogTail) -> list[str]:
    return [line.text for line in tail.read()]


@pytest.mark.parametrize(
    ("raw", "read"),
    [
        (f"{NOON} stdout hello  world".encode(), line("hello  world")),
        (f"{NOON} stderr ".encode(), line("", "stderr")),
        (f"{NOON} stdout \xff".encode("latin-1"), line("\ufffd")),
        (b"", None),
        (b"the end of a line that was cut", None),
        (b"00.000001Z stdout cut", None),
        (f"{NOON} stdin x".encode(), None),
        (f"{NOON} stdout".encode(), None),
    ],
)
def test_a_line_of_a_file(raw: bytes, read: LogLine | None) -> None:
    assert parse_line(raw) == read


def test_nothing_written_yet(tmp_path: Path, log: Path) -> None:
    assert LogTail(tmp_path).read() == []
    assert LogTail(tmp_path / "nowhere").read() == []


def test_each_read_gives_what_is_new(tmp_path: Path, log: Path) -> None:
    tail = LogTail(tmp_path)
    file = log / "00000001"
    file.write_bytes(written("a", "b"))
    assert texts(tail) == ["a", "b"]
    assert texts(tail) == []
    with file.open("ab") as more:
        more.write(written("c"))
    assert texts(tail) == ["c"]


def test_half_a_line_waits_for_its_other_half(tmp_path: Path, log: Path) -> None:
    tail = LogTail(tmp_path)
    whole = written("hello")
    (log / "00000001").write_bytes(whole[:40])
    assert texts(tail) == []
    (log / "00000001").write_bytes(whole)
    assert texts(tail) == ["hello"]


def test_files_that_turned_meanwhile_are_read_in_order(tmp_path: Path, log: Path) -> None:
    tail = LogTail(tmp_path)
    (log / "00000001").write_bytes(written("a"))
    assert texts(tail) == ["a"]
    (log / "00000001").write_bytes(written("a", "b"))
    (log / "00000002").write_bytes(written("c"))
    (log / "00000003").write_bytes(written("d"))
    assert texts(tail) == ["b", "c", "d"]


def test_a_file_that_was_removed_before_we_came_is_skipped(tmp_path: Path, log: Path) -> None:
    tail = LogTail(tmp_path)
    (log / "00000001").write_bytes(written("a"))
    assert texts(tail) == ["a"]
    (log / "00000001").unlink()
    (log / "00000004").write_bytes(written("e"))
    assert texts(tail) == ["e"]


def test_of_a_flood_only_the_end_is_read_in_whole_lines(tmp_path: Path, log: Path) -> None:
    many = [f"line {number:05d}" for number in range(1000)]
    (log / "00000001").write_bytes(written(*many[:600]))
    (log / "00000002").write_bytes(written(*many[600:]))
    size = len(written("line 00000"))
    tail = LogTail(tmp_path, backlog_bytes=size * 500 + 7)
    assert texts(tail) == many[500:]
    assert texts(tail) == []


def test_other_files_are_left_alone(tmp_path: Path, log: Path) -> None:
    (log / "notes.txt").write_text("not ours")
    (log / "00000001").write_bytes(written("a"))
    assert texts(LogTail(tmp_path)) == ["a"]


def test_only_the_last_lines_are_kept() -> None:
    book = LogBook(lines=3)
    book.append("m#0", [line(str(number)) for number in range(5)])
    assert [each.text for each in book.read("m#0")] == ["2", "3", "4"]


def test_replicas_are_merged_by_time_and_exact_keys_are_not() -> None:
    book = LogBook(lines=3)
    book.append("m#0", [line("a", at="2026-01-01T00:00:01.000000Z"), line("c", at="2026-01-01T00:00:03.000000Z")])
    book.append("m#1", [line("b", at="2026-01-01T00:00:02.000000Z"), line("d", at="2026-01-01T00:00:04.000000Z")])
    book.append("m#x#0", [line("another model", at="2026-01-01T00:00:00.000000Z")])
    assert [each.text for each in book.read("m")] == ["b", "c", "d"]
    assert [each.text for each in book.read("m#1")] == ["b", "d"]
    assert [each.text for each in book.read("m#x")] == ["another model"]
    assert book.names() == ["m", "m#x"]


def test_keys_nobody_writes_to_any_more_are_forgotten_in_the_end() -> None:
    book = LogBook()
    book.append("first#0", [line("a")])
    for number in range(300):
        book.append("busy#0", [line("b")])
        book.append(f"m{number}#0", [line("c")])
    assert book.read("first#0") == []
    assert len(book.read("busy#0")) == 300
    assert len(book.names()) == 256


async def test_a_follower_hears_only_what_it_asked_for() -> None:
    book = LogBook()
    book.append("m#0", [line("before")])
    async with book.follow("m") as lines:
        book.append("other#0", [line("no")])
        book.append("m#0", [line("yes")])
        book.append("m#7", [line("a new replica")])
        assert [each.text for each in lines.initial] == ["before"]
        assert (await anext(lines)).text == "yes"
        assert (await anext(lines)).text == "a new replica"
    book.append("m#0", [line("after it left")])
    assert lines.dropped == 0
