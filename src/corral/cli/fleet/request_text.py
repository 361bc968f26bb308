"""Receipts of requests as text. Pure; `requests.py` and `corral top` print it."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from corral.cli.common.output import printable, relative_time
from corral.kit.humanize import times

if TYPE_CHECKING:
    from corral.contract.receipts import RequestView, RunningView

COLUMNS = ("WHEN", "MODEL", "KEY", "STATUS", "NODE", "QUEUED", "LOADED", "FIRST", "TOTAL", "IN", "OUT", "NOTE")
NO_REQUESTS = "No requests. One is listed about a second after its end."
_WATCH = "{:<8}  {:<6}  {:<24}  {:<12}  {:<12}  {:>8}  {:>8}  {:>6}  {:>6}  {}"
WATCH_HEADER = _WATCH.format("ENDED", "STATUS", "MODEL", "KEY", "NODE", "FIRST", "TOTAL", "IN", "OUT", "NOTE").rstrip()


def watch_line(view: RequestView) -> str:
    """One line of a fixed width for each column: the next ones are not known yet."""
    ended = datetime.fromisoformat(view.at) + timedelta(milliseconds=view.total_ms)
    _, model, key, status, node, _, _, first, total, prompt, answer, words = row(view)
    clock = ended.astimezone().strftime("%H:%M:%S")
    return printable(_WATCH.format(clock, status, model, key, node, first, total, prompt, answer, words).rstrip())


def row(view: RequestView, now: datetime | None = None) -> tuple[str, ...]:
    return (
        relative_time(view.at, now),
        f"{view.model} ({view.served_by})" if view.served_by else view.model,
        view.key or view.key_id,
        str(view.status),
        view.node or view.node_id,
        duration(view.queue_ms),
        duration(view.load_ms),
        duration(view.first_byte_ms),
        duration(view.total_ms),
        str(view.prompt_tokens) if view.prompt_tokens else "",
        f"{'~' if view.estimated else ''}{view.completion_tokens}" if view.completion_tokens else "",
        note(view),
    )


RUNNING_COLUMNS = ("SINCE", "STATE", "MODEL", "KEY", "NODE", "TOKENS", "PATH", "ID")


def running_row(view: RunningView) -> tuple[str, ...]:
    return (
        duration(view.running_ms) or "0 ms",
        view.state,
        f"{view.model} ({view.served_by})" if view.served_by else view.model,
        view.key or view.key_id,
        view.node or view.node_id,
        f"~{view.tokens}" if view.tokens else "",
        view.path,
        view.id,
    )


def running_as_row(view: RunningView, now: datetime | None = None) -> tuple[str, ...]:
    """The same in the columns of requests that have ended."""
    since, state, model, key, node, tokens, _, _ = running_row(view)
    return relative_time(view.at, now), model, key, state, node, "", "", "", since, "", tokens, ""


def duration(ms: float) -> str:
    if ms < 0.5:
        return ""
    return f"{ms:.0f} ms" if ms < 10_000 else f"{ms / 1000:.1f} s"


def note(view: RequestView) -> str:
    words = {"client_left": "the client disconnected", "upstream_broke": "the replica closed the connection"}
    tried = f"{view.tries} attempts" if view.tries > 1 else ""
    resumed = f"resumed {times(view.resumed)}" if view.resumed else ""
    failed = printable(view.error_text or view.error)
    return ", ".join(word for word in (words.get(view.ending, view.ending), resumed, tried, failed) if word)
