"""The entry point. Imports only the module of the command that is run, so that small commands start quickly.

`main` turns every error into one line on stderr and an exit code: 0 done, 1 failed, 2 wrong usage, 3 not finished yet,
130 interrupted.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
import typer.core
import typer.main

from corral.cli.common.options import CONTEXT_HELP
from corral.cli.common.output import DONE, FAILED, INTERRUPTED, USAGE, print_error
from corral.kit.errors import CorralError
from corral.kit.settings import BadSettings

# Where each command is: the module, and the Typer application in it.
COMMANDS = {
    "up": "corral.cli.up.command:app",
    "join": "corral.cli.nodes.join:app",
    "nodes": "corral.cli.nodes.commands:app",
    "token": "corral.cli.nodes.tokens:app",
    "keys": "corral.cli.fleet.keys:app",
    "backends": "corral.cli.backends.commands:app",
    "models": "corral.cli.models.commands:app",
    "apply": "corral.cli.fleet.fleet_file:apply_app",
    "export": "corral.cli.fleet.fleet_file:export_app",
    "chat": "corral.cli.models.chat:app",
    "logs": "corral.cli.fleet.logs:app",
    "why": "corral.cli.fleet.why:app",
    "ops": "corral.cli.operations.commands:app",
    "requests": "corral.cli.fleet.requests:app",
    "contexts": "corral.cli.fleet.contexts:app",
    "doctor": "corral.cli.doctor.command:app",
    "controller": "corral.cli.nodes.role_commands:controller_app",
    "gateway": "corral.cli.nodes.role_commands:gateway_app",
    "worker": "corral.cli.nodes.role_commands:worker_app",
    "migrate-store": "corral.cli.fleet.migrate_store:app",
    "version": "corral.cli.version:app",
}
# Commands that start something or read only this machine: `corral --context NAME` before them would have no effect.
WITHOUT_CONTEXT = ("up", "join", "contexts", "controller", "gateway", "worker", "migrate-store", "version")

HELP = """One OpenAI-compatible endpoint over every machine you own.

\b
  corral up                        start a fleet on this machine, for this machine only
  corral up --lan                  start a fleet that other machines can join
  corral token create              print the command with which another machine joins
  corral nodes list                list the machines of the fleet
  corral backends install NAME     install an inference engine on every node
  corral models install NAME       install a model; `corral models available` lists them
  corral chat NAME "Hello"         send a prompt to a model
  corral ops list                  list the operations that have not ended
  corral why model NAME            show where the scheduler would place a model, and why
  corral doctor                    find problems and show how to fix them
"""


class LazyGroup(typer.core.TyperGroup):
    """Imports the module of a command when the command is looked up."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        return load(cmd_name)


def load(name: str) -> Any:
    module, _, attribute = COMMANDS[name].partition(":")
    found = getattr(importlib.import_module(module), attribute)
    # A role's application reads the settings of that role, so it is built only for the command that needs it.
    return typer.main.get_command(found if isinstance(found, typer.Typer) else found())


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
def _root(
    context: typer.Context,
    fleet: Annotated[
        str | None,
        typer.Option("--context", metavar="NAME", help=f"{CONTEXT_HELP}; every command that connects takes it too"),
    ] = None,
) -> None:
    """Typer shows HELP instead of this text. The commands read `--context` themselves (`common/fleet_command.py`)."""
    name = context.invoked_subcommand
    if fleet and name in WITHOUT_CONTEXT:
        raise typer.BadParameter(f"`corral {name}` does not connect to a fleet: remove --context before {name}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    for word in words:
        if not word.isprintable() and any("\ud800" <= sign <= "\udfff" for sign in word):
            print_error(f"{word.encode('utf-8', 'surrogateescape')!r} is not UTF-8; arguments must be UTF-8")
            return USAGE
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A character that the terminal cannot encode is shown as a question mark instead of ending the command.
        sys.stdout.reconfigure(errors="replace")
    try:
        result = typer.main.get_command(root).main(args=words, prog_name="corral", standalone_mode=False)
        sys.stdout.flush()
    except BrokenPipeError:
        # `corral nodes list | head` closed the pipe. Without this the interpreter reports the same error at exit.
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except BadSettings as error:
        print_error(error.message)
        return USAGE
    except CorralError as error:
        print_error(error.message)
        return FAILED
    except OSError as error:
        print_error(_os_error(error))
        return FAILED
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        return _usage_error(error)
    return result if isinstance(result, int) else DONE


def _usage_error(error: Any) -> int:
    message = error.format_message().removeprefix("Invalid value: ")
    context = getattr(error, "ctx", None)
    if type(error).__name__ == "NoArgsIsHelpError" or not message:
        print(context.get_help() if context else message, file=sys.stderr)
    else:
        command = context.command_path if context else "corral"
        print_error(f"{' '.join(message.split())} (see `{command} --help`)")
    return int(error.exit_code)


def _os_error(error: OSError) -> str:
    place = f"{error.filename}: " if error.filename else ""
    return f"{place}{error.strerror or error}"


if __name__ == "__main__":
    sys.exit(main())
