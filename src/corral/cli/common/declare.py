"""Declares commands: a function is a command, and the annotations of its parameters are its options and arguments.

    app = declare.App(help="…")

    @app.command("list")
    def list_nodes(as_json: Annotated[bool, declare.Option("--json", help="print JSON")] = False) -> int: ...

Click parses and writes the help. A command is built from its function only when it is looked up, because reading the
annotations of every command costs more than running one.
"""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import click
from click import Abort, BadParameter, Context, Parameter, confirm
from click.exceptions import Exit
from click.shell_completion import CompletionItem

__all__ = ["Abort", "App", "Argument", "BadParameter", "Context", "Exit", "Option", "Parameter", "confirm"]

Check = Callable[[Context, Parameter, Any], Any]
Complete = Callable[[Context, Parameter, str], list[str]]
_HELP = {"help_option_names": ["-h", "--help"], "max_content_width": 110}


class Option:
    """An option of a command. Without `flags` the name of the parameter is the flag."""

    def __init__(
        self,
        *flags: str,
        help: str = "",
        metavar: str | None = None,
        min: float | None = None,
        max: float | None = None,
        hidden: bool = False,
        is_eager: bool = False,
        callback: Check | None = None,
        envvar: str | None = None,
        complete: Complete | None = None,
    ) -> None:
        self.flags = flags
        self.limits = (min, max)
        self.complete = complete
        self.given: dict[str, Any] = {
            "help": help,
            "metavar": metavar,
            "hidden": hidden,
            "is_eager": is_eager,
            "callback": callback,
            "envvar": envvar,
        }


class Argument:
    """An argument of a command: a word without a flag. It is required if the parameter has no default."""

    def __init__(
        self,
        *,
        metavar: str | None = None,
        help: str = "",
        min: float | None = None,
        max: float | None = None,
        complete: Complete | None = None,
    ) -> None:
        self.metavar = metavar
        self.help = help
        self.limits = (min, max)
        self.complete = complete


class App:
    """A command, or a group of commands if there are several, or if it `is_group` although there is one so far."""

    def __init__(self, *, help: str = "", is_group: bool = False) -> None:
        self._help = help
        self._is_group = is_group
        self._functions: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {}

    def command(self, name: str, **settings: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """`settings` are those of click's context, such as `ignore_unknown_options`."""

        def keep(function: Callable[..., Any]) -> Callable[..., Any]:
            self._functions[name] = (function, settings)
            return function

        return keep

    def build(self) -> click.Command:
        if len(self._functions) == 1 and not self._is_group:
            return self._build_command(next(iter(self._functions)))
        commands = LazyCommands(tuple(self._functions), self._build_command)
        return Group(commands, help=inspect.cleandoc(self._help))

    def _build_command(self, name: str) -> click.Command:
        function, settings = self._functions[name]
        return _command(name, function, settings)


def with_parameters(
    function: Callable[..., Any], parameters: Callable[[], list[inspect.Parameter]], *, doc: str
) -> Callable[..., int]:
    """Give a `**kwargs` function the parameters of a command. They are asked for when the command is built."""
    function.__dict__["parameters"] = parameters
    function.__doc__ = doc
    return function


def keyword(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


class LazyCommands(Mapping[str, click.Command]):
    """Builds a command when it is looked up."""

    def __init__(self, names: Iterable[str], build: Callable[[str], click.Command]) -> None:
        self._names = tuple(names)
        self._build = functools.cache(build)

    def __getitem__(self, name: str) -> click.Command:
        if name not in self._names:
            raise KeyError(name)
        return self._build(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names


class Group(click.Group):
    """A group in the order in which its commands were declared."""

    commands: Mapping[str, click.Command]  # type: ignore[assignment]

    def __init__(self, commands: Mapping[str, click.Command], **settings: Any) -> None:
        super().__init__(**{"no_args_is_help": True, "context_settings": _HELP, **settings})
        self.commands = commands

    def list_commands(self, ctx: Context) -> list[str]:
        return list(self.commands)


class _Argument(click.Argument):
    """An argument whose name in the usage shows whether it is required."""

    def make_metavar(self, ctx: Context) -> str:
        words = self.human_readable_name if self.required else f"[{self.human_readable_name}]"
        return self._with_dots(words)

    def get_error_hint(self, ctx: Context | None) -> str:
        return f"'{self._with_dots(self.human_readable_name)}'"

    def _with_dots(self, words: str) -> str:
        return words if self.nargs == 1 else f"{words}..."


def _command(name: str, function: Callable[..., Any], settings: dict[str, Any]) -> click.Command:
    found = _parameters(function)
    with_context = [each.name for each in found if each.annotation is Context]
    params = [_parameter(each) for each in found if each.annotation is not Context]
    defaults = {each.name: each.default for each in found}
    lists = [each.name for each in params if each.name and (each.multiple or each.nargs == -1)]

    def call(**given: Any) -> Any:
        for each in lists:
            given[each] = list(given[each] or ()) or defaults[each]
        for each in with_context:
            given[each] = click.get_current_context()
        return function(**given)

    return click.Command(
        name,
        callback=functools.update_wrapper(call, function),
        params=params,
        help=inspect.getdoc(function),
        context_settings={**_HELP, **settings},
    )


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    given: Callable[[], list[inspect.Parameter]] | None = function.__dict__.get("parameters")
    return given() if given is not None else annotated_parameters(function)


def annotated_parameters(function: Callable[..., Any], **names: Any) -> list[inspect.Parameter]:
    """The parameters with their annotations read. `names`: what only the type checker imports."""
    hints = typing.get_type_hints(function, localns=names, include_extras=True)
    return [
        each.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[each.name])
        for each in inspect.signature(function).parameters.values()
    ]


def _parameter(each: inspect.Parameter) -> click.Parameter:
    kind, declared = typing.get_args(each.annotation)
    kinds = [one for one in typing.get_args(kind) if one is not type(None)]
    value = kinds[0] if type(None) in typing.get_args(kind) else kind
    is_list = typing.get_origin(value) is list
    given: dict[str, Any] = {"type": _type(value, declared.limits), "required": each.default is each.empty}
    complete = declared.complete or _complete_fleet_names(declared)
    if complete is not None:
        given["shell_complete"] = _completion(complete)
    if not given["required"] and not is_list:
        given["default"] = each.default
    if isinstance(declared, Argument):
        nargs = -1 if is_list else 1
        return _Argument([each.name], help=declared.help, metavar=declared.metavar, nargs=nargs, **given)
    flags = declared.flags or (f"--{each.name.replace('_', '-')}",)
    if value is bool:
        given["is_flag"] = True
        del given["type"]
    show_default = value is not bool and each.default not in (None, "", each.empty)
    return click.Option([*flags, each.name], multiple=is_list, show_default=show_default, **given, **declared.given)


def _type(kind: Any, limits: tuple[float | None, float | None]) -> click.ParamType[Any, Any]:
    low, high = limits
    if kind is int and limits != (None, None):
        return click.IntRange(low if low is None else int(low), high if high is None else int(high))
    if kind is float and limits != (None, None):
        return click.FloatRange(low, high)
    types: dict[Any, click.ParamType[Any, Any]] = {int: click.INT, float: click.FLOAT}
    return types.get(kind, click.STRING)


def _complete_fleet_names(declared: Option | Argument) -> Complete | None:
    """Nodes, models and operations by what the help calls them."""
    kind = declared.metavar if isinstance(declared, Argument) else declared.given["metavar"]
    if kind not in ("NODE", "MODEL", "OPERATION"):
        return None

    def complete(context: Context, *_: object) -> list[str]:
        from corral.cli.common.completion import complete_name

        return complete_name(kind, context)

    return complete


def _completion(complete: Complete) -> Callable[[Context, Parameter, str], list[CompletionItem]]:
    def offer(context: Context, parameter: Parameter, begun: str) -> list[CompletionItem]:
        return [CompletionItem(each) for each in complete(context, parameter, begun) if each.startswith(begun)]

    return offer
