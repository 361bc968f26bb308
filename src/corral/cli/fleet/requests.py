"""`corral requests`: the receipts of inference requests."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated

from corral.cli.common import declare
from corral.cli.common.fleet_command import fleet_command
from corral.cli.common.options import Json, reject_empty
from corral.cli.common.output import print_json, print_table
from corral.cli.fleet import request_text
from corral.kit.durations import parse_duration_s

if TYPE_CHECKING:
    from corral.client import Client

app = declare.App(
    help="List inference requests with their key, model, node, status and times.",
)


@app.command("requests")
@fleet_command
async def list_requests(
    client: Client,
    model: Annotated[
        str, declare.Option("--model", metavar="MODEL", help="only requests for this model", callback=reject_empty)
    ] = "",
    by: Annotated[
        str,
        declare.Option(
            "--by", metavar="KEY", help="only requests with this API key, by id or name", callback=reject_empty
        ),
    ] = "",
    node: Annotated[
        str,
        declare.Option("--node", metavar="NODE", help="only requests that this node answered", callback=reject_empty),
    ] = "",
    failed: Annotated[bool, declare.Option("--failed", help="only requests with status 400 or higher")] = False,
    since: Annotated[
        str,
        declare.Option(
            "--since", metavar="DURATION", help="only requests of this period until now: 15m, 2d", callback=reject_empty
        ),
    ] = "",
    limit: Annotated[
        int, declare.Option("--limit", "-n", min=1, max=100_000, metavar="N", help="maximum number of requests to list")
    ] = 50,
    as_json: Json = False,
) -> None:
    """List inference requests and their results, newest first.

    FIRST is the time from the request to the first content, reasoning or tool call of a streamed answer; it is empty
    for answers that are not streamed.

    \b
    Examples:
      corral requests
      corral requests --model smollm2-135m --failed --since 1h
      corral requests --by notebook -n 1000 --json
    """
    found = await client.requests.list(
        limit=limit, model=model, key=by, node=node, failed=failed, since=_timestamp(since) if since else ""
    )
    if as_json:
        print_json(found)
        return
    print_table(request_text.COLUMNS, [request_text.row(each) for each in found], empty="No requests.")


def _timestamp(duration: str) -> str:
    try:
        seconds = parse_duration_s(duration)
    except ValueError as error:
        raise declare.BadParameter(f"--since: {error}") from error
    return (datetime.now(UTC) - timedelta(seconds=seconds)).isoformat()
