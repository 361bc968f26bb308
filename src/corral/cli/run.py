"""Runs a command: finds it, imports its module and calls it.

Turns every error into one line on stderr and an exit code: 0 done, 1 failed, 2 wrong usage, 3 not finished yet,
130 interrupted.
"""

from __future__ import annotations

import importlib
import os
import sys

import click
from click.shell_completion import CompletionItem

from corral.cli import commands
from corral.cli.commands import COMMANDS, WITHOUT_CONTEXT
from corral.cli.common import declare
from corral.cli.common.output import (
    DONE,
    FAILED,
    INTERRUPTED,
    QUIET,
    USAGE,
    close_broken_stdout,
    print_error,
    print_line,
    replace_unencodable,
)
from corral.kit.errors import CorralError


def load(name: str) -> click.Command:
    """Import the module of a command and build the command."""
    module, _, attribute = COMMANDS[name][0].partition(":")
    found = getattr(importlib.import_module(module), attribute)
    # A role's application reads the settings of that role, so it is built only for the command that needs it.
    app: declare.App = found if isinstance(found, declare.App) else found()
    return app.build()


class _Root(declare.Group):
    """`corral` itself. The summaries of the commands are known, so help and completion import none of them."""

    def shell_complete(self, ctx: declare.Context, incomplete: str) -> list[CompletionItem]:
        if incomplete.startswith("-"):
            return super().shell_complete(ctx, incomplete)
        return [CompletionItem(name, help=COMMANDS[name][1]) for name in COMMANDS if name.startswith(incomplete)]

    def get_help(self, ctx: declare.Context) -> str:
        return commands.help_text()


def root() -> click.Group:
    return _Root(
        declare.LazyCommands(COMMANDS, load),
        callback=_before_command,
        invoke_without_command=True,
        no_args_is_help=False,
        params=[
            click.Option(["--context", "fleet"]),
            click.Option(["--quiet", "-q"], is_flag=True),
            click.Option(["--version"], is_flag=True, is_eager=True, expose_value=False, callback=_show_version),
        ],
    )


def _before_command(fleet: str | None, quiet: bool) -> None:
    """The commands read `--context` themselves (`common/fleet_command.py`)."""
    if quiet:
        os.environ[QUIET] = "1"
    name = click.get_current_context().invoked_subcommand
    if name is None:
        from corral.cli.fleet.overview import show_overview

        raise declare.Exit(show_overview(fleet))
    if fleet and name in WITHOUT_CONTEXT:
        raise declare.BadParameter(f"`corral {name}` does not connect to a fleet: remove --context before {name}")


def _show_version(context: declare.Context, _: object, is_given: bool) -> None:
    if is_given:
        from corral import __version__

        print_line(f"corral {__version__}")
        context.exit()


def run(words: list[str]) -> int:
    if instruction := os.environ.get("_CORRAL_COMPLETE"):
        from corral.cli.completion import answer_shell

        return answer_shell(instruction)
    for word in words:
        if not word.isprintable() and any("\ud800" <= sign <= "\udfff" for sign in word):
            print_error(f"{word.encode('utf-8', 'surrogateescape')!r} is not UTF-8; arguments must be UTF-8")
            return USAGE
    replace_unencodable()
    try:
        result = _invoke(words)
        sys.stdout.flush()
    except BrokenPipeError:
        close_broken_stdout()
        return FAILED
    except (KeyboardInterrupt, declare.Abort):
        return INTERRUPTED
    except CorralError as error:
        print_error(error.message)
        return USAGE if error.code == "bad_settings" else FAILED
    except OSError as error:
        print_error(_os_error(error))
        return FAILED
    except click.ClickException as error:
        return _usage_error(error)
    return result if isinstance(result, int) else DONE


def _invoke(words: list[str]) -> object:
    """Not click's own `main`, which prints an empty line at Ctrl-C."""
    try:
        with root().make_context("corral", words) as context:
            return context.command.invoke(context)
    except declare.Exit as end:
        return end.exit_code


def _usage_error(error: click.ClickException) -> int:
    message = error.format_message().removeprefix("Invalid value: ")
    context: declare.Context | None = getattr(error, "ctx", None)
    if isinstance(error, click.exceptions.NoArgsIsHelpError) or not message:
        print(context.get_help() if context else message, file=sys.stderr)
    else:
        if isinstance(error, click.NoSuchOption) and error.option_name.lstrip("-")[:1].isdigit():
            message = f"'{error.option_name}…' is a negative number, which this command does not take"
        command = context.command_path if context else "corral"
        print_error(f"{' '.join(message.split())} (see `{command} --help`)")
    return int(error.exit_code)


def _os_error(error: OSError) -> str:
    place = f"{error.filename}: " if error.filename else ""
    return f"{place}{error.strerror or error}"
