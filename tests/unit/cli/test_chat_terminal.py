"""Word wrap, commands and history of a conversation."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.cli.models.chat_terminal import LineReader, WordWrap, history_file, parse_command, prompt_of

TEXT = "A corral is a pen for horses and cattle.\n\nIt has   a gate."


def wrapped(text: str, width: int, size: int) -> str:
    wrap = WordWrap(width)
    return "".join(wrap.feed(text[at : at + size]) for at in range(0, len(text), size)) + wrap.flush()


def test_lines_break_at_words() -> None:
    assert wrapped(TEXT, 20, 3) == "A corral is a pen\nfor horses and\ncattle.\n\nIt has   a gate."


def test_code_stays_as_it_is() -> None:
    code = "Use this:\n```python\nvalue = a_long_name(with_many, arguments)\n```\nand that again and again"
    assert wrapped(code, 20, 4) == code.replace("again and again", "again and\nagain")


def test_a_word_that_is_too_long_is_left_to_the_terminal() -> None:
    assert wrapped("see https://corral.example/a/very/long/path now", 12, 5).split("\n")[1:] == [
        "https://corral.example/a/very/long/path",
        "now",
    ]


def test_wide_letters_count_twice() -> None:
    assert wrapped("馬 馬 馬 馬", 7, 1) == "馬 馬\n馬 馬"


@given(st.text("ab` \n", max_size=60), st.integers(1, 9), st.integers(3, 30))
def test_only_blanks_become_line_breaks_however_the_text_arrives(text: str, size: int, width: int) -> None:
    shown = wrapped(text, width, size)
    assert shown.split() == text.split()
    assert shown == wrapped(text, width, 1)


@pytest.mark.parametrize(
    ("line", "command"),
    [
        ("/help", ("/help", "")),
        ("/save  a b.md ", ("/save", "a b.md")),
        ("What is /help?", None),
        ("//help", None),
    ],
)
def test_commands_begin_with_one_slash(line: str, command: tuple[str, str] | None) -> None:
    assert parse_command(line) == command


def test_a_second_slash_is_for_prompts() -> None:
    assert (prompt_of("//help"), prompt_of("/ x")) == ("/help", "/ x")


def test_the_history_is_in_the_state_folder() -> None:
    assert history_file({"HOME": "/home/x"}) == Path("/home/x/.local/state/corral/chat-history")
    assert history_file({"HOME": "/home/x", "XDG_STATE_HOME": "/s"}) == Path("/s/corral/chat-history")


def test_the_history_is_private_bounded_and_has_no_line_twice_in_a_row(tmp_path: Path) -> None:
    path = tmp_path / "state" / "chat-history"
    reader = LineReader(path)
    for number in range(1100):
        reader._remember(f"prompt {number // 2 * 2}")
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    lines = path.read_text().splitlines()
    assert (len(lines), lines[0], lines[-1]) == (550, "prompt 0", "prompt 1098")
    assert [each.name for each in path.parent.iterdir()] == ["chat-history"]
    again = LineReader(path)
    for number in range(600):
        again._remember(f"later {number}")
    lines = path.read_text().splitlines()
    assert (len(lines), lines[-1]) == (1000, "later 599")


def test_without_a_file_nothing_is_kept(tmp_path: Path) -> None:
    LineReader(None)._remember("secret")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "state").write_text("not a folder")
    reader = LineReader(tmp_path / "state" / "chat-history")
    reader._remember("one")
    reader._remember("two")
    assert capsys.readouterr().err.count("the history cannot be kept") == 1
