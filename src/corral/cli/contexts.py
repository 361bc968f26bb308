"""`corral contexts …`: the fleets that run on this machine, and which of them commands go to."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import Annotated

import typer

from corral.cli.asking import Json
from corral.cli.output import pairs, plain, print_json, print_table, remark, tell

app = typer.Typer(
    rich_markup_mode=None,
    add_completion=False,
    no_args_is_help=True,
    help="Fleets of this machine by name: which one do commands go to?",
)
Name = Annotated[str, typer.Argument(metavar="NAME", help="from `corral contexts list`", show_default=False)]
COLUMNS = ("", "NAME", "STATE", "URL", "DATA", "PID")


@dataclass(frozen=True)
class _Row:
    """One context as people and scripts see it. `current`: commands without --context and --url go to it."""

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
    except NotFound:  # CORRAL_CONTEXT names one that is not there: none is current
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
    """List the fleets of this machine. A star marks the one that commands go to when nothing else is said.

    That is the one chosen with `corral contexts use`, else the running fleet that started first.

    \b
    Examples:
      corral contexts list
      corral contexts list --json
    """
    rows = _rows()
    if as_json:
        print_json([asdict(row) for row in rows])
        return
    print_table(COLUMNS, [row.cells() for row in rows], empty="no fleet runs here: `corral up` starts one")


@app.command("show")
def show(
    name: Annotated[
        str, typer.Argument(metavar="[NAME]", help="the current one when left out", show_default=False)
    ] = "",
    as_json: Json = False,
) -> None:
    """Show one context: where the fleet is, its data folder, whether it runs.

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
        raise NotFound("no fleet runs here: `corral up` starts one")
    if as_json:
        print_json(asdict(row))
        return
    public = row.public_url if row.public_url != row.url else ""
    for line in pairs(
        (
            ("name", row.name),
            ("state", row.state),
            ("url", row.url),
            ("public url", public),
            ("data", row.data),
            ("pid", str(row.pid or "")),
        )
    ):
        tell(line)


@app.command("use")
def use(name: Name) -> None:
    """Let commands go to this fleet until another is chosen or it stops. --context, --url and their variables win.

    \b
    Examples:
      corral contexts use corral-test
    """
    from corral.client.contexts import use_context

    context = use_context(os.environ, name)
    tell(plain(f"commands go to {context} now"))
    for variable in ("CORRAL_URL", "CORRAL_CONTEXT"):
        if os.environ.get(variable):
            remark(plain(f"{variable} is set to {os.environ[variable]} and wins: unset it"))


@app.command("delete")
def delete(name: Name) -> None:
    """Remove the entry of a fleet that does not run any more. Its data folder stays.

    \b
    Examples:
      corral contexts delete corral-test
    """
    from corral.client.contexts import delete_context

    context = delete_context(os.environ, name)
    tell(plain(f"{context.name} deleted; the fleet's data stays in {context.fleet.data}"))
