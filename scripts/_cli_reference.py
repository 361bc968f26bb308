"""Writes docs/reference/cli.md from the commands themselves; a test holds the page to the code.

.venv/bin/python scripts/_cli_reference.py
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from corral.cli.main import COMMANDS, load

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "cli.md"
ROLES = ("controller", "gateway", "worker")
CONNECTION = ("url", "key", "ca", "context")
HEAD = """# The command `corral`

| exit code | meaning |
|---|---|
| 0 | done |
| 1 | failed; one line on stderr says why and what to do |
| 2 | wrong use: an unknown word, a setting that cannot be used |
| 3 | still under way when the time was up |
| 130 | interrupted |

Commands that talk to a fleet find it by `--url` (with `--key` and `--ca`) or by `--context`, else by `CORRAL_URL`
(with `CORRAL_KEY` or `CORRAL_KEY_FILE`, and `CORRAL_CA`), else by `CORRAL_CONTEXT`, else by the fleets that run on this
machine: the one chosen with `corral contexts use`, else the running one that started first. A running `corral up` keeps
`~/.config/corral/contexts/NAME.json` for that (`CORRAL_CONFIG_DIR` moves the folder); the `local.json` of earlier
versions is still read. A key is only ever sent to the place it was given for.

Where several fleets run on this machine, commands that take something away (`delete`, `drain`, `replace`, `unload`,
`scale`, `edit`, `upgrade`, `rollback`, `revoke`, `cancel`, `withdraw`, `apply`, `nodes label`, `nodes budget` and
`nodes max-replicas` that change something, `models install --replace`, `ops history --clear`) say which fleet they go
to, and go on only if the fleet was named, with `--yes`, or after a question.

`--json` prints JSON and nothing else on stdout: every field is always there; new ones may be added, none goes away.
Without a terminal there is no colour and no question: what would ask needs `--yes`. `NO_COLOR` is respected.

Roles take their settings as flags, by environment or from a file: see [settings](settings.md).

This page is written by `scripts/_cli_reference.py`.
"""


def render() -> str:
    return HEAD + "".join(part for name in COMMANDS for part in _pages(name, load(name)))


def _pages(path: str, command: Any) -> Iterator[str]:
    inner = getattr(command, "commands", None)
    if not inner:
        yield _page(path, command)
        return
    yield f"\n## corral {path}\n\n{_words(command)[0]}\n"
    for name, each in inner.items():
        yield _page(f"{path} {name}", each, level="###")


def _page(path: str, command: Any, *, level: str = "##") -> str:
    words, example = _words(command)
    arguments = "".join(f" {_argument(each)}" for each in command.params if each.param_type_name == "argument")
    parts = [f"\n{level} corral {path}{arguments}\n\n{words}\n"]
    if example:
        parts.append(f"\n```\n{example}\n```\n")
    if path in ROLES:
        parts.append(f"\nOptions: [settings of the {path}](settings.md#corral-{path}).\n")
        return "".join(parts)
    options = [each for each in command.params if each.param_type_name == "option" and not each.hidden]
    # Those of the connection are the same everywhere and told above; `join` has a --ca of its own.
    told = () if path in ("join", "up") else CONNECTION
    rows = [f"| `{_flags(each)}` | {_cell(each)} |\n" for each in options if each.name not in told]
    if rows:
        parts.append("\n| option | meaning |\n|---|---|\n" + "".join(rows))
    return "".join(parts)


def _words(command: Any) -> tuple[str, str]:
    """The description, and the lines of examples."""
    text, _, example = inspect.cleandoc(command.help or "").partition("\b\nExamples:\n")
    return text.strip(), inspect.cleandoc(example)


def _argument(parameter: Any) -> str:
    metavar = str(parameter.metavar or parameter.name).strip("{}")
    return metavar if parameter.required or metavar.startswith("[") else f"[{metavar}]"


def _flags(option: Any) -> str:
    flags = ", ".join((*option.opts, *option.secondary_opts))
    return f"{flags} {option.metavar}" if option.metavar else flags


def _cell(option: Any) -> str:
    default = option.default
    shown = f" [{default}]" if isinstance(default, str) and default else ""
    return f"{option.help or ''}{shown}".replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(render())
