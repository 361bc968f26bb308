"""`corral token …`: what another machine needs to join."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Annotated

import typer

from corral.cli.asking import Json
from corral.cli.output import ago, print_json, print_table, remark, tell
from corral.cli.remote import remote, remote_destructive
from corral.kit.durations import parse_duration_s

if TYPE_CHECKING:
    from corral.client import Client
    from corral.client.endpoint import Endpoint
    from corral.contract.admin import JoinTokenView

app = typer.Typer(
    rich_markup_mode=None,
    add_completion=False,
    no_args_is_help=True,
    help="Join tokens: what another machine shows to enter the fleet.",
)


@app.command("create")
@remote
async def create_token(
    client: Client,
    name: Annotated[str, typer.Option("--name", metavar="TEXT", help="a word for the list")] = "",
    uses: Annotated[str, typer.Option("--uses", metavar="N", help="how many machines may use it, or unlimited")] = "1",
    expires: Annotated[str, typer.Option("--expires", metavar="SPAN", help="15m, 1h, 7d or never")] = "1h",
    pre_approved: Annotated[bool, typer.Option("--pre-approved", help="nobody need approve the machine")] = False,
    as_json: Json = False,
) -> None:
    """Make a token and print the line to run on the other machine.

    \b
    Examples:
      corral token create
      corral token create --uses 20 --expires 1d --pre-approved --name rack-3
    """
    from corral.contract.admin import CreateJoinToken

    wanted = CreateJoinToken(name=name, uses=_uses(uses), ttl_s=span_or_never(expires), pre_approved=pre_approved)
    created = await client.tokens.create(wanted)
    if as_json:
        print_json(created)
        return
    remark(f"Run this on the other machine ({_terms(created.token)}):")
    tell(created.join_command or join_line(client.endpoint, created.secret))
    if not pre_approved:
        remark("Then let it in with `corral nodes approve NAME`.")


@app.command("list")
@remote
async def list_tokens(
    client: Client,
    everything: Annotated[bool, typer.Option("--all", help="also those used up, expired or revoked")] = False,
    as_json: Json = False,
) -> None:
    """List join tokens. Their secrets are shown only once, when they are made.

    \b
    Examples:
      corral token list
      corral token list --all --json
    """
    tokens = [token for token in await client.tokens.list() if everything or token.state == "active"]
    if as_json:
        print_json(tokens)
        return
    rows = [
        (
            token.id,
            token.name,
            token.state,
            "unlimited" if token.uses_left is None else str(token.uses_left),
            str(token.uses),
            "yes" if token.pre_approved else "",
            ago(token.expires_at) if token.expires_at else "never",
            ago(token.created_at),
        )
        for token in tokens
    ]
    columns = ("ID", "NAME", "STATE", "USES LEFT", "USED", "PRE-APPROVED", "EXPIRES", "CREATED")
    print_table(columns, rows, empty="no tokens: `corral token create` makes one")


@app.command("revoke")
@remote_destructive
async def revoke_token(
    client: Client,
    ids: Annotated[list[str], typer.Argument(metavar="ID...", help="from `corral token list`", show_default=False)],
) -> None:
    """Make a token useless. Machines that joined with it stay.

    \b
    Examples:
      corral token revoke 3f2a…
    """
    for token_id in ids:
        await client.tokens.revoke(token_id)
        tell(f"{token_id} revoked")


def join_line(endpoint: Endpoint, secret: str) -> str:
    """What the other machine runs, as seen from here: used when the controller does not know its public address."""
    from corral.kit.certificates import fingerprint

    words = ["corral", "join", endpoint.url, "--token", secret]
    if endpoint.url.startswith("https://") and endpoint.ca:
        words += ["--ca", endpoint.ca if endpoint.ca.startswith("sha256:") else fingerprint(_pem(endpoint.ca))]
    return shlex.join(words)


def _pem(path: str) -> str:
    with open(path) as file:
        return file.read()


def _uses(text: str) -> int | None:
    if text in ("unlimited", "any"):
        return None
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise typer.BadParameter(f"--uses: {text!r} is neither a number from 1 on nor unlimited")
    return int(text)


def span_or_never(text: str) -> float | None:
    if text == "never":
        return None
    try:
        seconds = parse_duration_s(text)
    except ValueError as error:
        raise typer.BadParameter(f"--expires: {error}") from error
    if not seconds:
        raise typer.BadParameter("--expires: a span of 0 would be over at once; give one such as 1h, or never")
    return seconds


def _terms(token: JoinTokenView) -> str:
    uses = "any number of machines" if token.uses_left is None else f"{token.uses_left} use"
    uses += "s" if token.uses_left not in (None, 1) else ""
    return f"{uses}, {'expires ' + ago(token.expires_at) if token.expires_at else 'never expires'}"
