"""The settings of a process as options of its command, so that flags, variables and the reference page have one source.

`settings_command` makes a function whose parameters are the settings. The options have no default and no type of their
own: an option that is not given stays None, and `kit.settings.read_settings` reads, checks and explains all of them, so
a fault in a variable and a fault in a flag are reported in the same words.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

from corral.cli.common import declare
from corral.cli.common.declare import keyword, with_parameters
from corral.kit.settings import SettingDoc, describe, read_settings

T = TypeVar("T")
Run = Callable[..., int]


def settings_command(
    kind: type[T],
    run: Callable[[T], int],
    *,
    help: str,
    arguments: Mapping[str, Any] | None = None,
    read: Callable[[dict[str, Any]], dict[str, Any] | int] = lambda given: given,
    shown: Callable[[SettingDoc], bool] = lambda doc: not doc.advanced,
    env: Mapping[str, str] | None = None,
    remembered: Callable[[T], tuple[Path, Mapping[str, Any]]] | None = None,
) -> Run:
    """Make the function of a command. `arguments` are further parameters (name → annotation) before the settings.
    `read` turns the given values into flags of the settings, or into an exit code when there is nothing to run.
    `remembered` returns the saved settings of earlier starts and their file, given the settings of this start."""

    def invoke(**given: Any) -> int:
        config = given.pop("config_file")
        given.pop("help_all")
        flags = read({name: _joined(value) for name, value in given.items()})
        if isinstance(flags, int):
            return flags
        now: dict[str, Any] = {
            "flags": flags,
            "env": os.environ if env is None else env,
            "file": Path(config).expanduser() if config else None,
        }
        settings = read_settings(kind, **now)
        if remembered is not None:
            place, known = remembered(settings)
            if known:
                settings = read_settings(kind, **now, remembered=known, remembered_in=place)
        return run(settings)

    return with_parameters(invoke, lambda: _parameters(kind, arguments or {}, shown), doc=help)


def _parameters(
    kind: type[Any], arguments: Mapping[str, Any], shown: Callable[[SettingDoc], bool]
) -> list[inspect.Parameter]:
    found = [keyword(name, annotation, _default_of(annotation)) for name, annotation in arguments.items()]
    found += [keyword(doc.name, _option(doc, hidden=not shown(doc)), None) for doc in describe(kind)]
    config = declare.Option(
        "--config",
        envvar="CORRAL_CONFIG",
        metavar="FILE",
        help="TOML file with settings (CORRAL_CONFIG)",
    )
    help_all = declare.Option(
        "--help-all",
        is_eager=True,
        callback=_show_all_options,
        help="show every option, also the rarely needed ones, and exit",
    )
    found.append(keyword("config_file", Annotated[str | None, config], None))
    found.append(keyword("help_all", Annotated[bool, help_all], False))
    return found


def _default_of(annotation: Any) -> Any:
    """None for a parameter whose type includes None; any other parameter is required."""
    return None if type(None) in getattr(annotation.__origin__, "__args__", ()) else inspect.Parameter.empty


def _option(doc: SettingDoc, *, hidden: bool) -> Any:
    default = {"": "", "false": "", "required": " [required]"}.get(doc.default, f" [default: {doc.default}]")
    text = f"{doc.help}{default} ({doc.env})"
    if doc.kind == "true/false":
        return Annotated[bool | None, declare.Option(f"{doc.flag}/--no-{doc.flag[2:]}", hidden=hidden, help=text)]
    metavar = {"duration": "DURATION", "number": "N", "path": "PATH", "list": "A,B"}.get(doc.kind, "TEXT")
    option = declare.Option(doc.flag, hidden=hidden, metavar=metavar, help=text)
    # A list is given as one value with commas, or by repeating the flag.
    return Annotated[list[str] | None, option] if doc.kind == "list" else Annotated[str | None, option]


def _joined(value: Any) -> Any:
    return (",".join(value) or None) if isinstance(value, list | tuple) else value


def _show_all_options(context: declare.Context, _: declare.Parameter, is_given: bool) -> None:
    if not is_given:
        return
    for parameter in context.command.params:
        if hasattr(parameter, "hidden"):
            parameter.hidden = False
    print(context.get_help())
    raise declare.Exit
