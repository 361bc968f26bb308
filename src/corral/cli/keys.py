"""`corral keys …`: who may use the fleet."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from corral.cli.asking import Json
from corral.cli.output import ago, print_json, print_table, remark, tell
from corral.cli.remote import remote, remote_destructive
from corral.cli.tokens import span_or_never

if TYPE_CHECKING:
    from corral.client import Client
    from corral.contract.view import KeyLimits

app = typer.Typer(
    rich_markup_mode=None,
    add_completion=False,
    no_args_is_help=True,
    help="API keys: who may use the fleet, look at it, or run it.",
)
ROLES = ("inference", "viewer", "admin")


@app.command("create")
@remote
async def create_key(
    client: Client,
    name: Annotated[str, typer.Argument(metavar="NAME", help="a word for the list", show_default=False)],
    role: Annotated[str, typer.Option("--role", metavar="ROLE", help="inference, viewer or admin")] = "inference",
    models: Annotated[
        list[str] | None, typer.Option("--model", metavar="MODEL", help="only this model; may be repeated")
    ] = None,
    expires: Annotated[str, typer.Option("--expires", metavar="SPAN", help="1h, 30d or never")] = "never",
    requests_per_min: Annotated[
        int | None, typer.Option("--requests-per-min", min=1, metavar="N", help="at most so many")
    ] = None,
    tokens_per_min: Annotated[
        int | None, typer.Option("--tokens-per-min", min=1, metavar="N", help="at most so many")
    ] = None,
    concurrent: Annotated[int | None, typer.Option("--concurrent", min=1, metavar="N", help="requests at once")] = None,
    as_json: Json = False,
) -> None:
    """Make a key and print it, this once.

    \b
    Examples:
      corral keys create notebook
      corral keys create dashboard --role viewer
      corral keys create guests --model smollm2-135m --requests-per-min 60 --expires 30d
    """
    from corral.contract.admin import CreateKey
    from corral.contract.view import KeyLimits

    if role not in ROLES:
        raise typer.BadParameter(f"--role: {role!r} is none of {', '.join(ROLES)}")
    limits = (requests_per_min, tokens_per_min, concurrent)
    created = await client.keys.create(
        CreateKey(
            name=name,
            role=role,
            models=tuple(models) if models else None,
            limits=KeyLimits(*limits) if any(limits) else None,
            ttl_s=span_or_never(expires),
        )
    )
    if as_json:
        print_json(created)
        return
    tell(created.secret)
    remark("Keep it: it is shown only now. " + f"`corral keys revoke {created.key.id}` takes it back.")


@app.command("list")
@remote
async def list_keys(
    client: Client,
    everything: Annotated[bool, typer.Option("--all", help="also those expired or revoked")] = False,
    as_json: Json = False,
) -> None:
    """List keys. The keys themselves are shown only once, when they are made.

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
            ago(key.expires_at) if key.expires_at else "",
            ago(key.last_used_at),
            ago(key.created_at),
        )
        for key in keys
    ]
    columns = ("ID", "NAME", "ROLE", "STATE", "MODELS", "LIMITS", "EXPIRES", "USED", "CREATED")
    print_table(columns, rows, empty="no keys: `corral keys create NAME` makes one")


def _limits(limits: KeyLimits | None) -> str:
    if limits is None:
        return ""
    told = (
        (limits.requests_per_min, "requests/min"),
        (limits.tokens_per_min, "tokens/min"),
        (limits.concurrent, "at once"),
    )
    return ", ".join(f"{number} {words}" for number, words in told if number)


@app.command("revoke")
@remote_destructive
async def revoke_key(
    client: Client,
    ids: Annotated[list[str], typer.Argument(metavar="ID...", help="from `corral keys list`", show_default=False)],
) -> None:
    """Refuse a key from now on; streams it has begun may end.

    \b
    Examples:
      corral keys revoke 9c1d…
    """
    for key_id in ids:
        await client.keys.revoke(key_id)
        tell(f"{key_id} revoked")
