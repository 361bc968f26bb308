"""`corral contexts …`: the fleets of this machine, and which of them commands use."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import Annotated

from corral.cli.common import declare
from corral.cli.common.options import Json
from corral.cli.common.output import key_value_lines, print_json, print_line, print_note, print_table, printable

app = declare.App(
    help="""List the fleets of this machine, and choose one.

    \b
    Examples:
      corral contexts list
      corral contexts use corral-test
    """,
)
Name = Annotated[str, declare.Argument(metavar="NAME", help="name of the context, from `corral contexts list`")]
COLUMNS = ("", "NAME", "STATE", "URL", "DATA", "PID")


@dataclass(frozen=True)
class _Row:
    """One context for output. `current`: commands without --context and --url use it."""

    name: str
    current: bool
    running: bool
    url: str
    public_url: str
    data: str
    pid: int

    def cells(self) -> tuple[str, ...]:
        pid = str(self.pid) if self.running else ""
        return ("*" if self.current else "", self.name, self.state, self.url, self.data, pid)

    @property
    def state(self) -> str:
        return "running" if self.running else "not running"


def _rows() -> list[_Row]:
    from corral.client.contexts import choose_context, list_contexts
    from corral.kit.errors import NotFound

    try:
        choice = choose_context(os.environ)
    except NotFound:  # CORRAL_CONTEXT names a context that does not exist: none is current
        choice = None
    return [
        _Row(
            name=each.name,
            current=choice is not None and each.name == choice.context.name,
            running=each.is_live,
            url=each.fleet.url,
            public_url=each.fleet.public_url,
            data=each.fleet.data,
            pid=each.fleet.pid,
        )
        for each in list_contexts(os.environ)
    ]


@app.command("list")
def list_(as_json: Json = False) -> None:
    """List the fleets of this machine. A star marks the current one, which commands use by default.

    The current fleet is the one chosen with `corral contexts use`, else the running fleet that started first.

    \b
    Examples:
      corral contexts list
      corral contexts list --json
    """
    rows = _rows()
    if as_json:
        print_json([asdict(row) for row in rows])
        return
    print_table(COLUMNS, [row.cells() for row in rows], empty="No fleet runs on this machine. Start one: `corral up`")


@app.command("show")
def show(
    name: Annotated[
        str,
        declare.Argument(metavar="NAME", help="name of the context; without it, the current one"),
    ] = "",
    as_json: Json = False,
) -> None:
    """Show one context: URL, data folder and state of the fleet.

    \b
    Examples:
      corral contexts show
      corral contexts show corral-test --json
    """
    from corral.client.contexts import get_context
    from corral.kit.errors import NotFound

    wanted = get_context(os.environ, name).name if name else ""
    row = next((each for each in _rows() if (each.name == wanted if wanted else each.current)), None)
    if row is None:
        raise NotFound("no fleet runs on this machine: start one with `corral up`")
    if as_json:
        print_json(asdict(row))
        return
    public = row.public_url if row.public_url != row.url else ""
    for line in key_value_lines(
        (
            ("name", row.name),
            ("state", row.state),
            ("url", row.url),
            ("public url", public),
            ("data", row.data),
            ("pid", str(row.pid or "")),
        )
    ):
        print_line(line)


@app.command("use")
def use(name: Name) -> None:
    """Make commands use this fleet by default.

    The choice holds until the fleet stops or another one is chosen.

    --context, --url, CORRAL_CONTEXT and CORRAL_URL take precedence.

    \b
    Examples:
      corral contexts use corral-test
    """
    from corral.client.contexts import use_context

    context = use_context(os.environ, name)
    print_line(printable(f"Commands now use {context}."))
    for variable in ("CORRAL_URL", "CORRAL_CONTEXT"):
        if os.environ.get(variable):
            print_note(printable(f"{variable} is set to {os.environ[variable]} and takes precedence: unset it"))


@app.command("delete")
def delete(name: Name) -> None:
    """Delete the context of a fleet that does not run. Its data folder stays.

    \b
    Examples:
      corral contexts delete corral-test
    """
    from corral.client.contexts import delete_context

    context = delete_context(os.environ, name)
    print_line(printable(f"{context.name} deleted. The data of the fleet stays in {context.fleet.data}."))
