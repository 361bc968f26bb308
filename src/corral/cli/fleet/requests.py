"""`corral requests`: the receipts of inference requests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Annotated

from corral.cli.common import declare
from corral.cli.common.fleet_command import fleet_command
from corral.cli.common.options import Json, reject_empty
from corral.cli.common.output import print_error, print_json, print_line, print_note, print_table
from corral.cli.fleet import request_text
from corral.kit.durations import parse_duration_s
from corral.kit.errors import Invalid, NotFound
from corral.kit.humanize import similar_names

if TYPE_CHECKING:
    from corral.client import Client
    from corral.contract.receipts import RequestView

_WATCHED = 200  # newest receipts
_WATCH_S = 1.0
_RUNNING_S = 2.0  # as gateways report them
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
    failed: Annotated[
        bool, declare.Option("--failed", help="only failed requests; clients that left do not count")
    ] = False,
    status: Annotated[
        str,
        declare.Option(
            "--status", metavar="STATUS", help="only requests with this status: 503, 4xx, 5xx", callback=reject_empty
        ),
    ] = "",
    since: Annotated[
        str,
        declare.Option(
            "--since", metavar="DURATION", help="only requests of this period until now: 15m, 2d", callback=reject_empty
        ),
    ] = "",
    limit: Annotated[
        int, declare.Option("--limit", "-n", min=1, max=100_000, metavar="N", help="maximum number of requests to list")
    ] = 50,
    watch: Annotated[bool, declare.Option("--watch", "-w", help="print each request as it ends, until Ctrl-C")] = False,
    running: Annotated[
        bool,
        declare.Option("--running", help="list the requests under way, the oldest 200; with --watch every 2 s again"),
    ] = False,
    as_json: Json = False,
) -> None:
    """List inference requests and their results, newest first.

    FIRST is the time from the request to the first content, reasoning or tool call of a streamed answer; it is empty
    for answers that are not streamed.

    \b
    Examples:
      corral requests
      corral requests --model smollm2-135m --failed --since 1h
      corral requests --status 5xx --since 2d
      corral requests --by notebook -n 1000 --json
      corral requests --watch --failed
      corral requests --running --model smollm2-135m
    """
    if running:
        if failed or status or since:
            raise Invalid("--running lists requests that have not ended: leave --failed, --status and --since out")
        await _list_running(client, model=model, key=by, node=node, watch=watch, as_json=as_json)
        return
    started = _timestamp(since) if since else ""
    read = partial(client.requests.list, model=model, key=by, node=node, failed=failed, status=status, since=started)
    if watch:
        await _refuse_unknown(client, model=model, key=by, node=node)
        await _watch(read, as_json=as_json)
        return
    found = await read(limit=limit)
    if not found:  # receipts of deleted models and nodes are still found by name
        await _refuse_unknown(client, model=model, key=by, node=node)
    if as_json:
        print_json(found)
        return
    print_table(request_text.COLUMNS, [request_text.row(each) for each in found], empty=request_text.NO_REQUESTS)


async def _refuse_unknown(client: Client, *, model: str, key: str, node: str) -> None:
    """Raises NotFound with similar names."""
    if node:
        await client.nodes.get(node)
    if model:
        await client.models.get(model)
    if key:
        keys = await client.keys.list()
        if not any(key in (each.id, each.name) for each in keys):
            similar = similar_names(key, [each.name for each in keys])
            hint = f"; similar names: {', '.join(similar)}" if similar else "; `corral keys list --all` lists them"
            raise NotFound(f"no key named {key!r}{hint}")


async def _list_running(client: Client, *, model: str, key: str, node: str, watch: bool, as_json: bool) -> None:
    while True:
        found = await client.requests.running(model=model, key=key, node=node)
        if as_json:
            print_json(found.requests, indent=None if watch else 2)
        else:
            rows = [request_text.running_row(each) for each in found.requests]
            print_table(request_text.RUNNING_COLUMNS, rows, empty="No request is under way.")
            if found.total > len(rows):
                print_note(f"({found.total} are under way; these are the oldest)")
        if not watch:
            return
        await asyncio.sleep(_RUNNING_S)
        if not as_json:
            print_line()


async def _watch(read: Callable[..., Awaitable[Sequence[RequestView]]], *, as_json: bool) -> None:
    """Receipts come when requests have ended, in any order: the newest are read again, and those that were printed are
    left out."""
    from corral.client.errors import NO_ANSWER

    new_requests = NewRequests()
    new_requests.of(await read(limit=_WATCHED))
    if not as_json:
        print_line(request_text.WATCH_HEADER)
    while True:
        await asyncio.sleep(_WATCH_S)
        try:
            found = await read(limit=_WATCHED)
        except NO_ANSWER as error:
            print_error(f"{error.message}; retrying")
            continue
        for each in new_requests.of(found):
            if as_json:
                print_json(each, indent=None)
            else:
                print_line(request_text.watch_line(each))
        if new_requests.may_have_missed and not as_json:
            print_note(f"(more than {_WATCHED} requests ended within {_WATCH_S:g} s: some are not shown)")


class NewRequests:
    """Which receipts were not there before. Pure."""

    def __init__(self) -> None:
        self._seen: set[str] | None = None
        self.may_have_missed = False

    def of(self, newest_first: Sequence[RequestView]) -> list[RequestView]:
        """The new ones, oldest first. None the first time."""
        before = self._seen
        new = [each for each in reversed(newest_first) if before is not None and each.id not in before]
        self.may_have_missed = before is not None and len(new) >= _WATCHED
        self._seen = {each.id for each in newest_first}
        return new


def _timestamp(duration: str) -> str:
    try:
        seconds = parse_duration_s(duration)
    except ValueError as error:
        raise declare.BadParameter(f"--since: {error}") from error
    return (datetime.now(UTC) - timedelta(seconds=seconds)).isoformat()
