"""Settings of a process as options of its command, so that flags, environment and reference page have one source.

Typer reads a function's signature; `command_of` makes a function whose signature is the settings' declaration. Options
carry no default and no type of their own: what is not given stays None, and `kit.settings.read_settings` reads, checks
and explains everything, so a fault in a variable and one in a flag sound alike.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from corral.kit.settings import SettingDoc, describe, read_settings

T = TypeVar("T")
Run = Callable[..., int]


def command_of(
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
    """A function for Typer. `arguments` are further parameters (name → annotation) that come before the settings;
    `read` turns everything given into flags of the settings, or into an exit code when there is nothing to run.
    `remembered` finds the settings of earlier starts, and the file they are in, given those of this start."""

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

    return with_parameters(invoke, _parameters(kind, arguments or {}, shown), doc=help)


def with_parameters(function: Callable[..., Any], parameters: list[inspect.Parameter], *, doc: str) -> Run:
    """Dress a `**kwargs` function in a signature that Typer can read."""
    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    function.__annotations__ = {each.name: each.annotation for each in parameters}
    function.__doc__ = doc
    return function


def _parameters(
    kind: type[Any], arguments: Mapping[str, Any], shown: Callable[[SettingDoc], bool]
) -> list[inspect.Parameter]:
    found = [_keyword(name, annotation, _default_of(annotation)) for name, annotation in arguments.items()]
    found += [_keyword(doc.name, _option(doc, hidden=not shown(doc)), None) for doc in describe(kind)]
    config = typer.Option(
        "--config", envvar="CORRAL_CONFIG", show_envvar=False, metavar="FILE", help="TOML file with settings"
    )
    everything = typer.Option("--help-all", is_eager=True, callback=_show_everything, help="show every option and exit")
    found.append(_keyword("config_file", Annotated[str | None, config], None))
    found.append(_keyword("help_all", Annotated[bool, everything], False))
    return found


def _keyword(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _default_of(annotation: Any) -> Any:
    """A further parameter that may be None has None as default; any other is required."""
    return None if type(None) in getattr(annotation.__origin__, "__args__", ()) else inspect.Parameter.empty


def _option(doc: SettingDoc, *, hidden: bool) -> Any:
    words = doc.help + (f" [{doc.default}]" if doc.default not in ("", "false") else "") + f" ({doc.env})"
    if doc.kind == "true/false":
        return Annotated[bool | None, typer.Option(f"{doc.flag}/--no-{doc.flag[2:]}", hidden=hidden, help=words)]
    metavar = {"duration": "SPAN", "number": "N", "path": "PATH", "list": "A,B"}.get(doc.kind, "TEXT")
    option = typer.Option(doc.flag, hidden=hidden, metavar=metavar, help=words)
    # A list may be given as one word with commas or by repeating the flag.
    return Annotated[list[str] | None, option] if doc.kind == "list" else Annotated[str | None, option]


def _joined(value: Any) -> Any:
    return (",".join(value) or None) if isinstance(value, list | tuple) else value


def _show_everything(context: typer.Context, asked: bool) -> None:
    if not asked:
        return
    for parameter in context.command.params:
        if hasattr(parameter, "hidden"):
            parameter.hidden = False
    print(context.get_help())
    raise typer.Exit
