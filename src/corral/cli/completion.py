"""`corral completion`: prints the script with which a shell completes commands, options and names."""

from __future__ import annotations

import os
from pathlib import PurePath
from typing import Annotated

from click.shell_completion import get_completion_class, shell_complete

from corral.cli.common import declare
from corral.cli.common.output import print_line

VARIABLE = "_CORRAL_COMPLETE"  # set by the script when the shell asks
SHELLS = ("bash", "zsh", "fish")

app = declare.App()


@app.command("completion")
def completion(
    shell: Annotated[
        str,
        declare.Argument(
            metavar="SHELL", help="bash, zsh or fish; the one of $SHELL", complete=lambda *_: list(SHELLS)
        ),
    ] = "",
) -> None:
    """Print the script with which a shell completes commands and names.

    It completes commands, options, and the names of nodes, models and operations of the fleet.

    \b
    Examples:
      corral completion fish >~/.config/fish/completions/corral.fish
      echo 'eval "$(corral completion bash)"' >>~/.bashrc
      echo 'eval "$(corral completion zsh)"' >>~/.zshrc          (after compinit)
    """
    from corral.cli.run import root

    name = shell or PurePath(os.environ.get("SHELL", "")).name
    kind = get_completion_class(name) if name in SHELLS else None
    if kind is None:
        raise declare.BadParameter(f"no completion for {name or 'an unknown shell'!r}: give bash, zsh or fish")
    print_line(kind(root(), {}, "corral", VARIABLE).source())


def answer_shell(instruction: str) -> int:
    """The words that the shell offers: `bash_complete`, `zsh_complete`, `fish_complete`."""
    from corral.cli.run import root

    return shell_complete(root(), {}, "corral", VARIABLE, instruction)
