"""Options before the command, and the list of commands."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

import corral.client
from corral import __version__
from corral.cli.commands import COMMANDS, WITHOUT_CONTEXT, help_text
from corral.cli.main import main
from corral.cli.run import load


def is_group(name: str) -> bool:
    return hasattr(load(name), "commands")


class Found(Exception):
    pass


@pytest.fixture
def contexts(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """The contexts with which commands look for a fleet."""
    seen: list[str | None] = []

    def find(**given: Any) -> None:
        seen.append(given["context"])
        raise Found

    monkeypatch.setattr(corral.client, "find_endpoint", find)
    return seen


@pytest.mark.parametrize(
    ("words", "context"),
    [
        (("--context", "test", "nodes", "list"), "test"),
        (("nodes", "list", "--context", "test"), "test"),
        (("--context", "first", "nodes", "list", "--context", "second"), "second"),
        (("nodes", "list"), None),
    ],
)
def test_the_context_stands_before_or_after_the_command(
    contexts: list[str | None], words: tuple[str, ...], context: str | None
) -> None:
    with pytest.raises(Found):
        main(list(words))
    assert contexts == [context]


@pytest.mark.parametrize("name", WITHOUT_CONTEXT)
def test_a_context_before_a_command_that_connects_to_no_fleet_is_refused(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--context", "test", name]) == 2
    assert f"`corral {name}` does not connect to a fleet: remove --context before {name}" in capsys.readouterr().err


@pytest.mark.parametrize("group", [(), *((name,) for name in COMMANDS if is_group(name))], ids="-".join)
def test_help_shows_every_summary_whole_at_80_columns(
    group: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    main([*group, "--help"])
    listed = capsys.readouterr().out.partition("\nCommands:\n")[2].splitlines()
    assert listed
    assert [line for line in listed if line.endswith("...")] == []


@pytest.mark.parametrize("name", COMMANDS)
def test_the_known_summary_of_a_command_is_its_own(name: str) -> None:
    assert COMMANDS[name][1] == load(name).get_short_help_str(limit=80)


@pytest.mark.parametrize("words", [("--help",), ("-h",), ("--context", "test", "--help")])
def test_the_help_is_the_same_before_and_after_other_options(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 0
    assert capsys.readouterr().out == help_text() + "\n"


def test_help_and_version_load_no_parser_and_no_client() -> None:
    """The parser alone takes longer to import than the interpreter to start."""
    for word, first in (("--help", "Usage: corral"), ("--version", f"corral {__version__}")):
        program = (
            f"import sys; from corral.cli.main import main; main(['{word}']); print(*sys.modules, file=sys.stderr)"
        )
        found = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True)
        assert found.stdout.startswith(first)
        assert set(found.stderr.split()).isdisjoint(
            {"click", "typing", "asyncio", "msgspec", "aiohttp", "corral.client"}
        )


@pytest.mark.parametrize("words", [("--version",), ("-q", "--version")])
def test_the_version(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 0
    assert capsys.readouterr().out == f"corral {__version__}\n"


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (("nodse",), "corral: No such command 'nodse'. Did you mean 'nodes'? (see `corral --help`)"),
        (("nodes", "lsit"), "corral: No such command 'lsit'. Did you mean 'list'? (see `corral nodes --help`)"),
        (
            ("nodes", "list", "--jsn"),
            "corral: No such option '--jsn'. Did you mean '--json'? (see `corral nodes list --help`)",
        ),
        (("nodes", "drain"), "corral: Missing argument 'NODE...'. (see `corral nodes drain --help`)"),
        (
            ("models", "scale", "m", "--max", "x"),
            "corral: Invalid value for '--max': 'x' is not a valid integer range.",
        ),
    ],
)
def test_wrong_usage_is_explained(words: tuple[str, ...], answer: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert capsys.readouterr().err.startswith(answer)


def test_a_closed_stdout_is_no_traceback() -> None:
    program = "import sys; from corral.cli.main import main; sys.exit(main(['version']))"
    found = subprocess.run(
        ["sh", "-c", 'exec "$0" -P -c "$1" >&-', sys.executable, program], capture_output=True, text=True
    )
    assert (found.returncode, found.stderr) == (0, "")
