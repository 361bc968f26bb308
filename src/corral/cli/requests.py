"""`corral requests`: what became of requests for models."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated

import typer

from corral.cli.asking import Json, said
from corral.cli.output import ago, print_json, print_table
from corral.cli.remote import remote
from corral.kit.durations import parse_duration_s

if TYPE_CHECKING:
    from corral.client import Client
    from corral.contract.receipts import RequestView

app = typer.Typer(
    rich_markup_mode=None, add_completion=False, help="Requests: who asked which model, who answered, how long it took."
)
_COLUMNS = ("WHEN", "MODEL", "KEY", "STATUS", "NODE", "QUEUED", "LOADED", "FIRST", "TOTAL", "IN", "OUT", "REMARK")


@app.command("requests")
@remote
async def list_requests(
    client: Client,
    model: Annotated[str, typer.Option("--model", metavar="MODEL", help="only for this model", callback=said)] = "",
    by: Annotated[
        str, typer.Option("--by", metavar="KEY", help="only of this API key, by id or name", callback=said)
    ] = "",
    node: Annotated[str, typer.Option("--node", metavar="NODE", help="only answered by this node", callback=said)] = "",
    failed: Annotated[bool, typer.Option("--failed", help="only those answered with 400 or more")] = False,
    since: Annotated[
        str, typer.Option("--since", metavar="SPAN", help="only of the last so long: 15m, 2d", callback=said)
    ] = "",
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=100_000, metavar="N", help="at most so many")] = 50,
    as_json: Json = False,
) -> None:
    """List what became of requests, the newest first.

    FIRST is the time from the request to the first content, reasoning or tool call of a streamed answer; it is empty
    for answers that are not streamed.

    \b
    Examples:
      corral requests
      corral requests --model smollm2-135m --failed --since 1h
      corral requests --by notebook -n 1000 --json
    """
    found = await client.requests.list(
        limit=limit, model=model, key=by, node=node, failed=failed, since=_moment(since) if since else ""
    )
    if as_json:
        print_json(found)
        return
    print_table(_COLUMNS, [_row(each) for each in found], empty="no requests")


def _moment(span: str) -> str:
    try:
        seconds = parse_duration_s(span)
    except ValueError as error:
        raise typer.BadParameter(f"--since: {error}") from error
    return (datetime.now(UTC) - timedelta(seconds=seconds)).isoformat()


def _row(view: RequestView) -> tuple[str, ...]:
    return (
        ago(view.at),
        f"{view.model} ({view.served_by})" if view.served_by else view.model,
        view.key or view.key_id,
        str(view.status),
        view.node or view.node_id,
        _span(view.queue_ms),
        _span(view.load_ms),
        _span(view.first_byte_ms),
        _span(view.total_ms),
        str(view.prompt_tokens) if view.prompt_tokens else "",
        f"{'~' if view.estimated else ''}{view.completion_tokens}" if view.completion_tokens else "",
        _remark(view),
    )


def _span(ms: float) -> str:
    if ms < 0.5:
        return ""
    return f"{ms:.0f} ms" if ms < 10_000 else f"{ms / 1000:.1f} s"


def _remark(view: RequestView) -> str:
    words = {"client_left": "the client left", "upstream_broke": "the replica broke off"}
    tried = f"{view.tries} tries" if view.tries > 1 else ""
    return ", ".join(word for word in (words.get(view.ending, view.ending), tried) if word)
