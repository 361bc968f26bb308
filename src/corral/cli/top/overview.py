"""The first view of `corral top`: how the fleet is, what needs a person, what runs, the last requests. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import TYPE_CHECKING

from corral.cli.common.output import printable
from corral.cli.fleet import request_text
from corral.cli.operations import text as operation_text
from corral.cli.top.state import FleetState, request_rates
from corral.kit.humanize import format_bytes

if TYPE_CHECKING:
    from corral.contract.admin import OperationView
    from corral.contract.receipts import RequestView

MAX_REQUESTS_READ = 100  # receipts that are read at a time
_BAR = 20
_MAX_ATTENTION = 6
_SERVING = ("healthy", "draining", "unhealthy")


def overview_lines(state: FleetState, now: datetime, height: int, *, with_requests: bool = True) -> list[str]:
    """At most `height` lines. The last requests take what the rest leaves."""
    lines = list(_figures(state, now))
    lines += _section("Needs attention", [f"! {printable(each)}" for each in state.attention], _MAX_ATTENTION)
    running = [_operation_line(view) for view in state.operations if not view.finished_at]
    lines += _section("Operations", running, max(3, (height - len(lines)) // 2 - 2))
    left = height - len(lines) - 2 if with_requests else 0
    if left > 0:
        lines += _section("Last requests", [_request_line(each, now) for each in state.requests[:left]], left)
    return lines[:height]


def _figures(state: FleetState, now: datetime) -> Iterator[str]:
    counts = state.nodes_by_status()
    by_status = ", ".join(f"{count} {status}" for status, count in counts.most_common())
    yield f"nodes       {len(state.nodes)}" + (f": {by_status}" if counts else "")
    serving = [node for node in state.nodes if node.status in _SERVING]
    yield from _memory("VRAM", sum(node.available_vram for node in serving), sum(node.total_vram for node in serving))
    yield from _memory("RAM", sum(node.available_ram for node in serving), sum(node.total_ram for node in serving))
    ready = sum(bool(model.ready) for model in state.models)
    yield f"models      {len(state.models)} installed, {ready} ready; {_count(_ready_replicas(state), 'replica')}"
    rates = request_rates(state.requests, now, is_whole=len(state.requests) < MAX_REQUESTS_READ)
    first = f"; first token {request_text.duration(rates.first_token_ms)}" if rates.first_token_ms else ""
    yield (
        f"requests    {rates.requests_per_s:.1f}/s, {rates.failed} failed in the last minute; "
        f"{rates.tokens_per_s:.1f} tokens/s{first}"
    )
    waiting = sum(each.state == "waiting" for each in state.running)
    words = f"{_count(sum(node.in_flight_count for node in state.nodes), 'request')} at nodes"
    requests = f"; {state.running_total} under way, {waiting} waiting" if state.running_total else ""
    yield f"in flight   {words}{requests}"


def _ready_replicas(state: FleetState) -> int:
    return sum(str(each.get("state", "")) == "loaded" for each in state.replicas)


def _memory(name: str, free: int, total: int) -> Iterator[str]:
    if total:
        used = min(max(total - free, 0), total)
        yield f"{name:<11} {bar(used / total)} {format_bytes(used)} of {format_bytes(total)} used"


def bar(share: float, width: int = _BAR) -> str:
    """In ASCII: not every terminal has blocks."""
    full = round(min(max(share, 0.0), 1.0) * width)
    return f"[{'#' * full}{'.' * (width - full)}]"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _section(title: str, lines: list[str], most: int) -> list[str]:
    if not lines or most <= 0:
        return []
    shown = lines if len(lines) <= most else [*lines[: most - 1], f"  and {len(lines) - most + 1} more"]
    return ["", title, *(f"  {line}" for line in shown)]


def _operation_line(view: OperationView) -> str:
    _, kind, name, where, state, done, nodes, _, note = operation_text.row(view)
    words = f"{kind} {name} on {where}: {state}" + (f" {done}" if state == "running" else "") + f", {nodes}"
    return printable(f"{words} ({note})" if note and note != state else words)


def _request_line(view: RequestView, now: datetime) -> str:
    when, model, key, status, node, *_ = request_text.row(view, now)
    total = request_text.duration(view.total_ms)
    note = request_text.note(view)
    return printable(f"{when:<10} {status}  {model}  {total}  {node}  {key}{'  ' + note if note else ''}")
