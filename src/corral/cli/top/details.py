"""What Enter and `w` show in `corral top`, as lines, and the changes that its keys ask for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from corral.cli.common.output import as_plain_data, key_value_lines, table_lines
from corral.cli.fleet import why_text
from corral.cli.nodes import text as node_text
from corral.cli.operations import text as operation_text
from corral.cli.top.screen_state import Act, Explain
from corral.kit.errors import NotFound

if TYPE_CHECKING:
    from corral.cli.top.state import FleetState
    from corral.client import Client
    from corral.contract.receipts import RequestView, RunningView
    from corral.contract.why import WhyReplica


async def explain(client: Client, fleet: FleetState, requested: Explain, width: int) -> list[str]:
    """Raises the fleet's errors."""
    match requested.kind:
        case "node":
            return await _node(client, fleet, requested, width)
        case "model":
            why = await client.why.model(requested.id)
            lines = [*why_text.model_details(why), *_replicas(why.replicas, width)]
            lines += _section(why_text.NODE_COLUMNS, why_text.verdict_rows(why), width, "There are no nodes.")
            return lines
        case "operation":
            view = await client.operations.get(requested.id)
            rows = [operation_text.node_row(each) for each in view.nodes]
            lines = list(operation_text.details(view))
            return [*lines, *_section(operation_text.NODE_COLUMNS, rows, width, "The operation has no nodes.")]
        case "request":
            return list(_request(fleet, requested.id))


async def _node(client: Client, fleet: FleetState, requested: Explain, width: int) -> list[str]:
    node = fleet.nodes.get(requested.id)
    lines = list(node_text.details(node)) if node is not None else []
    why = await client.why.node(requested.id)
    # The name is in the details already.
    lines += ["", *(line for line in why_text.node_details(why) if not line.startswith("node "))]
    lines += _section(why_text.SPACE_COLUMNS, [why_text.space_row(each) for each in why.spaces], width, "")
    lines += _replicas(why.replicas, width)
    return [*lines, *_section(why_text.MODEL_COLUMNS, why_text.model_rows(why), width, "There are no models.")]


def _request(fleet: FleetState, id: str) -> Iterator[str]:
    known: list[RequestView | RunningView] = [*fleet.requests, *fleet.running]  # the receipt, once there is one
    view = next((each for each in known if each.id == id), None)
    if view is None:
        raise NotFound("the request is no longer among the newest; find it with `corral requests --json`")
    data = as_plain_data(view)
    yield from key_value_lines((name.replace("_", " "), str(value)) for name, value in data.items() if value != "")


def _replicas(replicas: Sequence[WhyReplica], width: int) -> list[str]:
    rows = [why_text.replica_row(each) for each in replicas]
    return _section(why_text.REPLICA_COLUMNS, rows, width, "") if rows else []


def _section(columns: Sequence[str], rows: Iterable[Sequence[str]], width: int, empty: str) -> list[str]:
    shown = list(rows)
    if not shown:
        return ["", empty] if empty else []
    return ["", *table_lines(columns, shown, width)]


async def act(client: Client, requested: Act) -> str:
    """Carry out a change and say what follows from it. Raises the fleet's errors."""
    match requested.kind:
        case "drain":
            await client.nodes.drain(requested.id)
            return f"{requested.name} drains. Press d again to take it back."
        case "resume":
            await client.nodes.resume(requested.id)
            return f"{requested.name} is in service again."
        case "approve":
            await client.nodes.approve(requested.id)
            return f"{requested.name} is approved."
        case "retry":
            await client.operations.retry(requested.id)
            return f"{requested.name}: retrying now."
        case "cancel":
            steered = await client.operations.cancel(requested.id)
            return f"{requested.name}: {steered.message or 'cancelled'}"
