"""`corral token …`: join tokens, with which other machines join the fleet."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Annotated

from corral.cli.common import declare
from corral.cli.common.fleet_command import destructive_command, fleet_command
from corral.cli.common.options import Json
from corral.cli.common.output import print_json, print_line, print_note, print_table, relative_time
from corral.kit.durations import parse_duration_s

if TYPE_CHECKING:
    from corral.client import Client
    from corral.client.endpoint import Endpoint
    from corral.contract.admin import JoinTokenView

MAX_LIFETIME_S = 3650 * 86_400.0
app = declare.App(
    help="""Create, list and revoke join tokens. A machine needs a token to join the fleet.

    \b
    Examples:
      corral token create --uses 20 --expires 1d
      corral token list
    """,
)


@app.command("create")
@fleet_command
async def create_token(
    client: Client,
    name: Annotated[str, declare.Option("--name", metavar="TEXT", help="a label, shown by `corral token list`")] = "",
    uses: Annotated[
        str, declare.Option("--uses", metavar="N", help="number of machines that can join with the token, or unlimited")
    ] = "1",
    expires: Annotated[
        str, declare.Option("--expires", metavar="DURATION", help="lifetime of the token: 15m, 1h, 7d or never")
    ] = "1h",
    pre_approved: Annotated[
        bool, declare.Option("--pre-approved", help="admit the machine without `corral nodes approve`")
    ] = False,
    as_json: Json = False,
) -> None:
    """Create a join token and print the join command.

    Another machine joins with this command, which first installs Corral there if necessary. The command checks the
    installer before it runs it, and does not show the token to other users of that machine. Options of `corral join`
    can be added at its end. In the JSON, `secret` is the token itself, `token` describes it, and `join_command` and
    `install_command` are the lines to run.

    \b
    Examples:
      corral token create
      corral token create --uses 20 --expires 1d --pre-approved --name rack-3
    """
    from corral.contract.admin import CreateJoinToken

    body = CreateJoinToken(
        name=name,
        uses=_uses(uses),
        ttl_s=duration_or_never(expires),
        pre_approved=pre_approved,
        url=public_url(client.endpoint),
    )
    created = await client.tokens.create(body)
    if as_json:
        print_json(created)
        return
    short = created.join_command or join_line(client.endpoint, created.secret)
    print_note(f"Run this on the other machine ({_terms(created.token)}):")
    print_line(created.install_command or short)
    if created.install_command:
        print_note(f"Where Corral is installed already: {short}")
    if not pre_approved:
        print_note("Then admit the machine: `corral nodes approve NAME`.")


@app.command("list")
@fleet_command
async def list_tokens(
    client: Client,
    everything: Annotated[
        bool, declare.Option("--all", help="include tokens that are used up, expired or revoked")
    ] = False,
    as_json: Json = False,
) -> None:
    """List join tokens. A secret is shown only once, when its token is created.

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
            relative_time(token.expires_at) if token.expires_at else "never",
            relative_time(token.created_at),
        )
        for token in tokens
    ]
    columns = ("ID", "NAME", "STATE", "USES LEFT", "USED", "PRE-APPROVED", "EXPIRES", "CREATED")
    print_table(columns, rows, empty="There are no join tokens. Create one: `corral token create`")


@app.command("revoke")
@destructive_command
async def revoke_token(
    client: Client,
    ids: Annotated[list[str], declare.Argument(metavar="ID", help="token ids, from `corral token list`")],
) -> None:
    """Revoke join tokens. Machines that joined with them stay in the fleet.

    \b
    Examples:
      corral token revoke 3f2a…
    """
    for token_id in ids:
        await client.tokens.revoke(token_id)
        print_line(f"{token_id} revoked")


def public_url(endpoint: Endpoint) -> str:
    """The URL with which the CLI reaches the fleet, if another machine could use it."""
    return endpoint.url if endpoint.url.startswith(("http://", "https://")) else ""


def join_line(endpoint: Endpoint, secret: str) -> str:
    """The command for the other machine, used when the controller does not know its public address."""
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
        raise declare.BadParameter(f"--uses: {text!r} is not a number of 1 or more, and not `unlimited`")
    return int(text)


def duration_or_never(text: str) -> float | None:
    if text == "never":
        return None
    try:
        seconds = parse_duration_s(text)
    except ValueError as error:
        raise declare.BadParameter(f"--expires: {error}") from error
    if not seconds:
        raise declare.BadParameter("--expires: must be more than 0, such as 1h, or never")
    if seconds > MAX_LIFETIME_S:
        raise declare.BadParameter("--expires: at most ten years (3650d), or never")
    return seconds


def _terms(token: JoinTokenView) -> str:
    uses = "any number of machines" if token.uses_left is None else f"{token.uses_left} machine"
    uses += "s" if token.uses_left not in (None, 1) else ""
    return f"valid for {uses}, {'expires ' + relative_time(token.expires_at) if token.expires_at else 'never expires'}"
