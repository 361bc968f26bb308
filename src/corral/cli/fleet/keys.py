"""`corral keys …`: API keys, their roles and limits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from corral.cli.common import declare
from corral.cli.common.fleet_command import destructive_command, fleet_command
from corral.cli.common.options import Json
from corral.cli.common.output import print_json, print_line, print_note, print_table, relative_time
from corral.cli.nodes.tokens import duration_or_never

if TYPE_CHECKING:
    from corral.client import Client, Endpoint
    from corral.contract.view import KeyLimits

app = declare.App(
    help="""Create, list and revoke API keys. The role of a key is inference, viewer or admin.

    \b
    Examples:
      corral keys create notebook
      corral keys list
    """,
)
ROLES = ("inference", "viewer", "admin")


@app.command("create")
@fleet_command
async def create_key(
    client: Client,
    name: Annotated[str, declare.Argument(metavar="NAME", help="a label, shown by `corral keys list`")],
    role: Annotated[
        str,
        declare.Option(
            "--role",
            metavar="ROLE",
            help="inference (use models), viewer (read the state of the fleet) or admin (change it)",
        ),
    ] = "inference",
    models: Annotated[
        list[str] | None, declare.Option("--model", metavar="MODEL", help="allow only this model; can be repeated")
    ] = None,
    expires: Annotated[
        str, declare.Option("--expires", metavar="DURATION", help="lifetime of the key: 1h, 30d or never")
    ] = "never",
    requests_per_min: Annotated[
        int | None, declare.Option("--requests-per-min", min=1, metavar="N", help="maximum requests per minute")
    ] = None,
    tokens_per_min: Annotated[
        int | None, declare.Option("--tokens-per-min", min=1, metavar="N", help="maximum tokens per minute")
    ] = None,
    concurrent: Annotated[
        int | None, declare.Option("--concurrent", min=1, metavar="N", help="maximum concurrent requests")
    ] = None,
    as_json: Json = False,
) -> None:
    """Create an API key and print it. The key is shown only once. In the JSON it is `secret`; `key` describes it.

    \b
    Examples:
      corral keys create notebook
      corral keys create dashboard --role viewer
      corral keys create guests --model smollm2-135m --requests-per-min 60 --expires 30d
    """
    from corral.contract.admin import CreateKey
    from corral.contract.view import KeyLimits

    if not name.strip():
        raise declare.BadParameter("the name is empty: `corral keys list` shows keys by their names")
    if role not in ROLES:
        raise declare.BadParameter(f"--role: {role!r} is not a role: choose {', '.join(ROLES)}")
    limits = (requests_per_min, tokens_per_min, concurrent)
    created = await client.keys.create(
        CreateKey(
            name=name,
            role=role,
            models=tuple(models) if models else None,
            limits=KeyLimits(*limits) if any(limits) else None,
            ttl_s=duration_or_never(expires),
        )
    )
    if as_json:
        print_json(created)
        return
    print_line(created.secret)
    print_note(f"Save the key: it is not shown again. Revoke it: `corral keys revoke {created.key.id}`")
    for line in client_hints(client.endpoint):
        print_note(line)


def client_hints(endpoint: Endpoint) -> list[str]:
    """How a client uses the key. Pure."""
    found = [f"OpenAI clients: OPENAI_BASE_URL={endpoint.url}/v1 OPENAI_API_KEY=<the key>"]
    if endpoint.url.startswith("https://") and endpoint.ca:
        ca = "ca.pem" if endpoint.ca.startswith("sha256:") else endpoint.ca
        found.append(f"The fleet has a CA of its own, {endpoint.url}/ca.pem: they trust it with SSL_CERT_FILE={ca}")
    return found


@app.command("list")
@fleet_command
async def list_keys(
    client: Client,
    everything: Annotated[bool, declare.Option("--all", help="include keys that are expired or revoked")] = False,
    as_json: Json = False,
) -> None:
    """List API keys. A secret is shown only once, when its key is created.

    \b
    Examples:
      corral keys list
      corral keys list --all --json
    """
    keys = [key for key in await client.keys.list() if everything or key.state == "active"]
    if as_json:
        print_json(keys)
        return
    rows = [
        (
            key.id,
            key.name,
            key.role,
            key.state,
            "" if key.models is None else ", ".join(key.models),
            _limits(key.limits),
            relative_time(key.expires_at) if key.expires_at else "",
            relative_time(key.last_used_at),
            relative_time(key.created_at),
        )
        for key in keys
    ]
    columns = ("ID", "NAME", "ROLE", "STATE", "MODELS", "LIMITS", "EXPIRES", "USED", "CREATED")
    print_table(columns, rows, empty="There are no keys. Create one: `corral keys create NAME`")


def _limits(limits: KeyLimits | None) -> str:
    if limits is None:
        return ""
    parts = (
        (limits.requests_per_min, "requests/min"),
        (limits.tokens_per_min, "tokens/min"),
        (limits.concurrent, "concurrent"),
    )
    return ", ".join(f"{number} {words}" for number, words in parts if number)


@app.command("revoke")
@destructive_command
async def revoke_key(
    client: Client,
    ids: Annotated[list[str], declare.Argument(metavar="ID", help="key ids, from `corral keys list`")],
) -> None:
    """Revoke API keys. New requests with them are refused; running streams end normally.

    \b
    Examples:
      corral keys revoke 9c1d…
    """
    for key_id in ids:
        await client.keys.revoke(key_id)
        print_line(f"{key_id} revoked")
