"""Options before the command, and the list of commands."""

from __future__ import annotations

from typing import Any

import pytest

import corral.client
from corral.cli.main import COMMANDS, WITHOUT_CONTEXT, load, main


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
