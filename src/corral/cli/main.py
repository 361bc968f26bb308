"""The entry point. Commands are imported when they are used, so that a small one starts quickly.

Everything that goes wrong leaves here as one line on stderr and an exit code: 0 done, 1 failed, 2 wrong use, 3 still
under way, 130 interrupted.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import sys
from collections.abc import Sequence
from typing import Any

import typer
import typer.core
import typer.main

from corral.cli.output import DONE, FAILED, INTERRUPTED, USAGE, complain
from corral.kit.errors import CorralError
from corral.kit.settings import BadSettings

COMMANDS = {
    "up": "corral.cli.up.command",
    "join": "corral.cli.join",
    "nodes": "corral.cli.nodes",
    "token": "corral.cli.tokens",
    "keys": "corral.cli.keys",
    "backends": "corral.cli.backends",
    "models": "corral.cli.models",
    "apply": "corral.cli.apply",
    "export": "corral.cli.export",
    "chat": "corral.cli.chat",
    "logs": "corral.cli.logs",
    "why": "corral.cli.why",
    "ops": "corral.cli.ops",
    "requests": "corral.cli.requests",
    "contexts": "corral.cli.contexts",
    "doctor": "corral.cli.doctor.command",
    "controller": "corral.cli.run.controller",
    "gateway": "corral.cli.run.gateway",
    "worker": "corral.cli.run.worker",
    "migrate-store": "corral.cli.migrate",
    "version": "corral.cli.version",
}

HELP = """One OpenAI-compatible endpoint over every machine you own.

\b
  corral up                        a secure fleet of one, on this machine
  corral up --lan                  the same, and other machines may join
  corral token create              a join line for another machine
  corral nodes list                who is in the fleet
  corral backends install NAME     an inference engine on every node
  corral models install NAME       a model for the fleet; `corral models available` lists them
  corral ops list                  what is under way
  corral why model NAME            where it would go, and why not elsewhere
  corral doctor                    what is wrong, and how to mend it
"""


class LazyGroup(typer.core.TyperGroup):
    """Finds a command's module by the command's name; each has an `app`."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        return load(cmd_name)


def load(name: str) -> Any:
    place = COMMANDS[name]
    if place.startswith("corral.cli.run."):
        from corral.cli.run import role_app

        app = role_app(name)
    else:
        app = importlib.import_module(place).app
    return typer.main.get_command(app)


root = typer.Typer(
    cls=LazyGroup,
    help=HELP,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)


@root.callback()
def _root() -> None:
    """Replaced by HELP; Typer wants a function."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    for word in words:
        if not word.isprintable() and any("\ud800" <= sign <= "\udfff" for sign in word):
            complain(f"{word.encode('utf-8', 'surrogateescape')!r} is not UTF-8, which all words given here have to be")
            return USAGE
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal that lacks a letter shows a question mark for it; that is no reason to break off.
        sys.stdout.reconfigure(errors="replace")
    try:
        result = typer.main.get_command(root).main(args=words, prog_name="corral", standalone_mode=False)
        sys.stdout.flush()
    except BrokenPipeError:
        # `corral nodes list | head`: nobody reads on. The interpreter must not complain again when it ends.
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except BadSettings as error:
        complain(error.message)
        return USAGE
    except CorralError as error:
        complain(error.message)
        return FAILED
    except OSError as error:
        complain(_os_error(error))
        return FAILED
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        return _misused(error)
    return result if isinstance(result, int) else DONE


def _misused(error: Any) -> int:
    message = error.format_message().removeprefix("Invalid value: ")
    context = getattr(error, "ctx", None)
    if type(error).__name__ == "NoArgsIsHelpError" or not message:
        print(context.get_help() if context else message, file=sys.stderr)
    else:
        command = context.command_path if context else "corral"
        complain(f"{' '.join(message.split())} (see `{command} --help`)")
    return int(error.exit_code)


def _os_error(error: OSError) -> str:
    place = f"{error.filename}: " if error.filename else ""
    return f"{place}{error.strerror or error}"


if __name__ == "__main__":
    sys.exit(main())
