"""Commands that talk to a fleet: each gets a connected client and takes --url, --key, --ca and --context."""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec

from corral.cli.common import declare
from corral.cli.common.data_folder import DataFolder
from corral.cli.common.declare import annotated_parameters, keyword, with_parameters
from corral.cli.common.options import Ca, Context, Key, Url, Yes, confirm
from corral.cli.common.output import is_interactive, print_note, printable
from corral.kit.process import lock_holder

if TYPE_CHECKING:
    from corral.client import Client, Endpoint

IS_DESTRUCTIVE = "is_destructive"
P = ParamSpec("P")
Work = Callable[Concatenate["Client", P], Awaitable[int | None]]
_CONNECTION: dict[str, Any] = {"url": Url, "key": Key, "ca": Ca, "context": Context}


def fleet_command(work: Work[P]) -> Callable[..., int]:
    """Make a command of `async def list_nodes(client, …)`. The options of the connection follow its own parameters."""
    return _command(work, before=lambda endpoint, given: None, more=[])


def destructive_command(work: Work[P]) -> Callable[..., int]:
    """Make a command that stops, overwrites or deletes something. Where several fleets run on this machine, the command
    prints which fleet it would change, and continues only if the user named the fleet, gave --yes or confirms. A
    function without a parameter `yes` gets the option `--yes`."""
    return _destructive(work, lambda given: not given.get("dry_run"))


def destructive_if_given(*names: str) -> Callable[[Work[P]], Callable[..., int]]:
    """The same for a command that is destructive only when one of these options or arguments is given."""
    return lambda work: _destructive(work, lambda given: any(given.get(name) for name in names))


def _destructive(work: Work[P], is_destructive: Callable[[dict[str, Any]], bool]) -> Callable[..., int]:
    own = inspect.signature(work).parameters
    confirms_itself = "yes" in own

    def before(endpoint: Endpoint, given: dict[str, Any]) -> None:
        yes = bool(given.get("yes") if confirms_itself else given.pop("yes"))
        if is_destructive(given):
            _confirm_fleet(endpoint, yes=yes, confirms_itself=confirms_itself)

    more = [] if confirms_itself else [keyword("yes", Yes, False)]
    command = _command(work, before=before, more=more)
    command.__dict__[IS_DESTRUCTIVE] = True  # read by the test that lists the destructive commands
    return command


def _confirm_fleet(endpoint: Endpoint, *, yes: bool, confirms_itself: bool) -> None:
    if not endpoint.others:
        return
    fleet = f"the fleet {endpoint.context!r} ({endpoint.url}, {endpoint.data})"
    others = ", ".join(endpoint.others)
    if not yes and not is_interactive():
        raise declare.BadParameter(
            f"this command would change {fleet}, not {others}: choose a fleet with --context, or add --yes"
        )
    print_note(printable(f"This command changes {fleet}, not {others}."))
    if not yes and not confirms_itself:
        confirm(f"change {endpoint.context}")


def _command(
    work: Work[P], *, before: Callable[[Endpoint, dict[str, Any]], None], more: list[inspect.Parameter]
) -> Callable[..., int]:
    def invoke(**given: Any) -> int:
        from corral.client import Client, find_endpoint

        # `corral --context NAME nodes list` means the same as `corral nodes list --context NAME`.
        root = given.pop("command_context").find_root()
        given["context"] = given["context"] or root.params.get("fleet")
        endpoint = find_endpoint(**{name: given.pop(name) for name in _CONNECTION}, env=os.environ)
        before(endpoint, given)

        async def talk() -> int | None:
            async with Client(endpoint, is_supervised=partial(_is_supervised, endpoint.data)) as client:
                return await work(client, **given)  # type: ignore[call-arg]

        return asyncio.run(talk()) or 0

    def parameters() -> list[inspect.Parameter]:
        # Only the type checker imports the type of the client here: the import costs more than the rest of a command.
        own = [each for each in annotated_parameters(work, Client=object) if each.name != "client"]
        connection = [keyword(name, annotation, None) for name, annotation in _CONNECTION.items()]
        connection.append(keyword("command_context", declare.Context, inspect.Parameter.empty))
        return own + more + connection

    return with_parameters(invoke, parameters, doc=inspect.getdoc(work) or "")


def _is_supervised(data: str) -> bool:
    """Whether a `corral up` on this machine restarts the processes of the fleet: a stopped gateway is soon back."""
    try:
        return bool(data) and lock_holder(DataFolder(Path(data)).lock) is not None
    except OSError:
        return False
