"""Commands that the README and the how-tos show can be typed as they stand there."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from corral.cli.run import root

ROOT = Path(__file__).parents[3]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs" / "how-to").glob("*.md")))
_SHOWN = re.compile(r"^\s*(?:\$ )?(?:\w+=\S+ )*corral (?P<words>.+)$")
_PATTERN = re.compile(r"[|…]")  # stands for several commands, or leaves something out


def shown(text: str) -> Iterator[str]:
    """What is shown as a line of its own, without the remark beside it."""
    fenced = False
    for line in text.splitlines():
        if line.startswith("```"):
            fenced = not fenced
        elif fenced and (found := _SHOWN.match(line)):
            words = re.split(r"\s#|\s{3,}|;| && | > | < ", found["words"])[0]
            if not _PATTERN.search(words):
                yield words.strip()


COMMANDS = sorted({(page.relative_to(ROOT), words) for page in PAGES for words in shown(page.read_text())})


def test_some_are_found() -> None:
    assert len(COMMANDS) > 40
    assert {'chat smollm2-135m "What is a corral?"', "nodes list"} <= {words for _, words in COMMANDS}


@pytest.mark.parametrize(("page", "words"), COMMANDS)
def test_a_command_is_one(page: Path, words: str) -> None:
    command: click.Command = root()
    left = shlex.split(words)
    context = click.Context(command, info_name="corral")
    while isinstance(command, click.Group):  # down to the command itself, which reads the rest
        name, found, left = command.resolve_command(context, left)
        assert found is not None
        command = found
        context = click.Context(command, info_name=name, parent=context)
    command.parse_args(context, left)
