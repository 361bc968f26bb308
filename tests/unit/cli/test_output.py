"""Sizes, times, tables and JSON as people and scripts meet them."""

from __future__ import annotations

import io
import json
from datetime import UTC, datetime

import pytest
from rich.console import Console
from rich.text import Text

from corral.cli.common import output
from corral.cli.fleet.keys import client_hints
from corral.client import Endpoint
from corral.contract.admin import JoinTokenView, NodeView

NOON = datetime(2026, 11, 15, 12, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("stamp", "words"),
    [
        ("2026-11-15T11:59:55Z", "5s ago"),
        ("2026-11-15T11:58:30Z", "90s ago"),
        ("2026-11-15T11:45:10+00:00", "14m ago"),
        ("2026-11-15T14:00:00Z", "in 2h"),
        ("2026-11-01T12:00:00Z", "14d ago"),
        ("", "never"),
        ("0001-01-01T00:00:00Z", "never"),
        ("soon", "soon"),
    ],
)
def test_ago(stamp: str, words: str) -> None:
    assert output.relative_time(stamp, NOON).replace("1m30s", "90s") == words


def test_json_has_every_field_also_those_with_their_usual_value(capsys: pytest.CaptureFixture[str]) -> None:
    output.print_json([JoinTokenView(id="t", uses_left=None), NodeView(name="n")])
    token, node = json.loads(capsys.readouterr().out)
    assert token["uses_left"] is None
    assert token["expires_at"] == ""
    assert node["labels"] == {}
    assert node["devices"] == []


def test_a_table_off_a_terminal_has_no_colour_no_frame_and_no_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr("sys.stdout", out)
    long = "x" * 300
    output.print_table(("NAME", "STATUS", "EMPTY"), [("a", "healthy", ""), (long, "offline", "")], empty="none")
    lines = out.getvalue().splitlines()
    assert lines[0].split() == ["NAME", "STATUS"]
    assert lines[2].split() == [long, "offline"]
    assert "\x1b" not in out.getvalue()


@pytest.mark.parametrize(
    "rows",
    [
        [("a", "healthy", "", "1"), ("b" * 300, "offline", "", "")],
        [("機械室", "healthy", "", "x"), ("café", "pending", "é", "🐑")],
        [("", "", "", ""), (" indented", "trailing  ", "[red]x[/red]", "a\nb\x1b[2J")],
        [("only", "", "", "")],
    ],
)
def test_a_table_off_a_terminal_has_the_lines_that_rich_would_print(rows: list[tuple[str, ...]]) -> None:
    columns = ("NAME", "STATUS", "NOTE", "MODELS")
    assert output.text_lines(columns, rows) == output.table_lines(columns, rows, 10_000)


def test_a_table_on_a_wide_terminal_is_the_one_that_rich_would_print() -> None:
    columns = ("NAME", "STATUS", "EMPTY", "NOTE")
    rows = [("attic", "healthy", "", ""), ("機械室", "offline", "", "silent \x1b[2J"), ("barn", "unheard of", "", "x")]
    screen = Console(width=200, force_terminal=True, color_system="standard", legacy_windows=False, markup=False)
    with screen.capture() as captured:
        screen.print(output.table(columns, rows))
    whole = captured.get()
    ours = output.text_lines(columns, rows, styles=True)
    assert [Text.from_ansi(line).plain for line in ours] == [
        Text.from_ansi(line).plain.rstrip() for line in whole.splitlines()
    ]
    for styled in ("\x1b[32mhealthy", "\x1b[31moffline"):
        assert styled in whole
        assert styled in "".join(ours)
    assert ours[0] == "\x1b[1mNAME    STATUS      NOTE\x1b[0m"
    assert "\x1b" not in ours[3]
    assert output.widest(columns, rows) == max(Text.from_ansi(line).cell_len for line in ours)


def test_colour_on_a_terminal_but_not_under_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    for no_color, coloured in ((None, True), ("1", False)):
        monkeypatch.delenv("NO_COLOR", raising=False)
        if no_color:
            monkeypatch.setenv("NO_COLOR", no_color)
        screen = Terminal()
        output.console(screen).print(output.table(("STATUS",), [("healthy",)]))
        assert ("\x1b[32m" in screen.getvalue()) is coloured


def test_foreign_text_cannot_steer_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr("sys.stdout", out)
    output.print_table(("NAME",), [("\x1b[2Jevil[red]x[/red]",)], empty="none")
    assert "\x1b" not in out.getvalue()
    assert "[red]x[/red]" in out.getvalue()


def test_every_line_of_an_error_has_the_prefix_of_the_program(capsys: pytest.CaptureFixture[str]) -> None:
    output.print_error("first\nsecond\x07")
    assert capsys.readouterr().err == "corral: first\ncorral: second�\n"


@pytest.mark.parametrize(
    ("ca", "hint"),
    [
        ("", []),
        ("/data/secrets/ca.crt", ["they trust it with SSL_CERT_FILE=/data/secrets/ca.crt"]),
        ("sha256:abc", ["they trust it with SSL_CERT_FILE=ca.pem"]),
    ],
)
def test_a_new_key_comes_with_the_variables_of_clients(ca: str, hint: list[str]) -> None:
    first, *more = client_hints(Endpoint("https://fleet:8080", "ck_secret", ca))
    assert first == "OpenAI clients: OPENAI_BASE_URL=https://fleet:8080/v1 OPENAI_API_KEY=<the key>"
    assert [line.partition("/ca.pem: ")[2] for line in more] == hint
    assert "ck_secret" not in "".join((first, *more))
