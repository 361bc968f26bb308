"""Generates docs/reference/cli.md from the commands; a test compares the page with the code.

.venv/bin/python scripts/_cli_reference.py
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from corral.cli.commands import COMMANDS
from corral.cli.run import load

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "cli.md"
ROLES = ("controller", "gateway", "worker", "bus")
CONNECTION = ("url", "key", "ca", "context")
HEAD = """# The command `corral`

| exit code | meaning |
|---|---|
| 0 | done |
| 1 | failed; one line on stderr states the reason and what to do |
| 2 | wrong usage: an unknown command or option, an invalid setting |
| 3 | not finished yet when the command returned |
| 130 | interrupted |

A command that talks to a fleet uses the first of these that is given:

1. `--url` with `--key` and `--ca`, or `--context`. `--context` can also stand before the command:
   `corral --context test nodes list`.
2. `CORRAL_URL` with `CORRAL_KEY` or `CORRAL_KEY_FILE`, and `CORRAL_CA`.
3. `CORRAL_CONTEXT`.
4. The fleet of this machine that was chosen with `corral contexts use`, else the running one that started first.

A running `corral up` writes `~/.config/corral/contexts/NAME.json` for its context (`CORRAL_CONFIG_DIR` changes the
folder). The file `local.json` of earlier versions is still read. A key is sent only to the fleet it was given for.

Where several fleets run on this machine, destructive commands (`delete`, `drain`, `gc`, `replace`, `unload`, `scale`,
`edit`, `upgrade`, `rollback`, `pause`, `promote`, `abort`, `release-trust`, `revoke`, `cancel`, `withdraw`,
`apply`, `nodes label`, `nodes budget` and `nodes max-replicas` that change something, `models install --replace`,
`ops history --clear`) print which fleet they would change. They
continue only if the fleet was named, with `--yes`, or after confirmation.

`--json` prints JSON and nothing else on stdout. Every field is always present; releases may add fields and remove none.
Without a terminal there is no colour and no confirmation: commands that ask need `--yes`. `NO_COLOR` turns colour off.

Roles take their settings as flags, from the environment or from a file: see [settings](settings.md).

`scripts/_cli_reference.py` generates this page.
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
    # The connection options are the same everywhere and described above; `join` has its own --ca.
    omitted = () if path in ("join", "up") else CONNECTION
    rows = [f"| `{_flags(each)}` | {_cell(each)} |\n" for each in options if each.name not in omitted]
    if rows:
        parts.append("\n| option | meaning |\n|---|---|\n" + "".join(rows))
    return "".join(parts)


def _words(command: Any) -> tuple[str, str]:
    """The description, and the lines of the examples."""
    text, _, example = inspect.cleandoc(command.help or "").partition("\b\nExamples:\n")
    return text.strip(), inspect.cleandoc(example)


def _argument(parameter: Any) -> str:
    metavar = str(parameter.metavar or parameter.name).strip("{}") + ("..." if parameter.nargs == -1 else "")
    return metavar if parameter.required else f"[{metavar}]"


def _flags(option: Any) -> str:
    flags = ", ".join((*option.opts, *option.secondary_opts))
    return f"{flags} {option.metavar}" if option.metavar else flags


def _cell(option: Any) -> str:
    default = option.default
    shown = f" [default: {default}]" if isinstance(default, str) and default else ""
    return f"{option.help or ''}{shown}".replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(render())
