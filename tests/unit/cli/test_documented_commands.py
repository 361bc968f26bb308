"""Commands that the README and the documents show can be typed as they stand there."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import pytest

from corral.cli.run import root

ROOT = Path(__file__).parents[3]
# Not the generated page of commands, which shows their usage. Decision records show what was, at their time.
PAGES = (
    ROOT / "README.md",
    *(page for page in sorted((ROOT / "docs").rglob("*.md")) if page.name != "cli.md" and page.parent.name != "adr"),
)
ROOT_COMMAND = root()
_SHOWN = re.compile(r"^\s*(?:\$ )?(?:sudo |uvx --from \S+ )?(?:\w+=\S+ )*(?:[^|]+ \| )?(?:\S*/)?corral (?P<words>.+)$")
_SPAN = re.compile(r"`(?:\w+=\S+ )*corral (?P<words>[^`\n]+)`")
_REST = re.compile(r"\s#|\s{3,}|;| && | >| < | \| ")  # a remark, or the shell's own
_PATTERN = re.compile(r"[|…⟨\[]|\.\.\.")  # stands for several commands, or leaves something out


@dataclass(frozen=True)
class Shown:
    words: str
    in_sentence: bool  # which may name a command without its arguments


def shown(text: str) -> Iterator[Shown]:
    """What is shown as a line of its own, without the remark beside it, and what a sentence names in backticks."""
    fenced = False
    for line in text.splitlines():
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif fenced and (found := _SHOWN.match(line)):
            words = _REST.split(found["words"])[0]
            if not _PATTERN.search(words):
                yield Shown(words.strip().removesuffix("\\").strip(), in_sentence=False)
        elif not fenced:
            found_spans = (span["words"] for span in _SPAN.finditer(line))
            yield from (
                Shown(_REST.split(words)[0], in_sentence=True) for words in found_spans if not _PATTERN.search(words)
            )


def commands(page: Path) -> list[Shown]:
    return sorted(set(shown(page.read_text())), key=lambda each: each.words)


def why_wrong(each: Shown) -> str:
    """Empty for what can be typed."""
    command: click.Command = ROOT_COMMAND
    # A number stands in sentences as N.
    left = shlex.split(re.sub(r"\bN\b", "1", each.words) if each.in_sentence else each.words)
    context = click.Context(command, info_name="corral")
    try:
        while isinstance(command, click.Group) and left:  # down to the command itself, which reads the rest
            name, found, left = command.resolve_command(context, left)
            assert found is not None
            command = found
            context = click.Context(command, info_name=name, parent=context)
        if not isinstance(command, click.Group):
            command.parse_args(context, left)
        elif not each.in_sentence:
            return f"{each.words}: no command of the group"
    except click.exceptions.Exit:  # --help
        return ""
    except click.MissingParameter as error:
        return "" if each.in_sentence else f"{each.words}: {error.format_message()}"
    except click.ClickException as error:
        return f"{each.words}: {error.format_message()}"
    return ""


def test_some_are_found() -> None:
    found = [each for page in PAGES for each in commands(page)]
    words = {each.words for each in found if not each.in_sentence}
    assert len(found) > 200
    assert {'chat smollm2-135m "What is a corral?"', "nodes list"} <= words
    assert "why model NAME" in {each.words for each in found if each.in_sentence}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("```\n$ corral nodes list   # all\n```", [Shown("nodes list", False)]),
        ("```\nCORRAL_URL=x .venv/bin/corral nodes list | jq .\n```", [Shown("nodes list", False)]),
        ("```\ncorral completion bash >~/x\n```", [Shown("completion bash", False)]),
        ("```\ngit diff | corral chat tiny -\n```", [Shown("chat tiny -", False)]),
        ("Run `corral ops list` or `corral ops …`.", [Shown("ops list", True)]),
    ],
)
def test_what_counts_as_a_command(text: str, found: list[Shown]) -> None:
    assert list(shown(text)) == found


@pytest.mark.parametrize(
    ("each", "why"),
    [
        (Shown("nodes lsit", True), "No such command 'lsit'"),
        (Shown("nodes list --all", True), "No such option '--all'"),
        (Shown("nodes drain", False), "Missing argument"),
        (Shown("nodes", False), "no command of the group"),
    ],
)
def test_what_cannot_be_typed_is_found(each: Shown, why: str) -> None:
    assert why in why_wrong(each)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_of_a_page_can_be_typed(page: Path) -> None:
    assert [why for each in commands(page) if (why := why_wrong(each))] == []
