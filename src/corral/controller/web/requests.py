"""Receipts as the page shows them: a line per request. Pure."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from typing import Any
from urllib.parse import quote, urlencode

from corral.contract.receipts import RequestView, RunningView, is_failure, parse_statuses
from corral.controller.web.words import ago, model_href, node_href, parse_moment
from corral.kit.humanize import times

STATUS_CLASSES = ("4xx", "5xx")
SINCE = {"1h": 3600, "24h": 86400, "7d": 7 * 86400}
_ENDINGS = {"client_left": "the client disconnected", "upstream_broke": "the replica closed the connection"}


@dataclass(frozen=True)
class RequestFilter:
    """Which requests a person wants to see: for this model, only failed ones, those before this one."""

    model: str = ""
    key: str = ""  # id or name
    node: str = ""
    since: str = ""  # of `SINCE`
    failed: bool = False
    status: str = ""  # a code, or a class like `5xx`
    before: str = ""

    def since_moment(self, now: datetime) -> datetime | None:
        span_s = SINCE.get(self.since)
        return None if span_s is None else now - timedelta(seconds=span_s)

    @classmethod
    def read_status(cls, text: str) -> str:
        """Of an address; what is no status chooses nothing."""
        with contextlib.suppress(ValueError):
            parse_statuses(text)
            return text.lower()
        return ""

    def query(self, **changes: object) -> str:
        wanted = asdict(self) | changes
        given = {key: "true" if value is True else value for key, value in wanted.items() if value}
        return f"?{urlencode(given)}" if given else ""


@dataclass(frozen=True)
class RequestLine:
    key: str
    at: str
    when: str
    model: str
    served_by: str
    path: str
    who: str
    status: int
    failed: bool
    node: str
    queued: str
    loaded: str
    first: str
    total: str
    tokens: str
    remark: str
    model_href: str
    node_href: str
    speed: str  # tokens per second, of the answer
    link: str  # its own page
    title: str  # what tells it from others: its id, and what exactly answered


def request_lines(views: tuple[RequestView, ...], now: datetime) -> tuple[RequestLine, ...]:
    return tuple(_line(view, now) for view in views)


def span(ms: float) -> str:
    """Nothing for what took no time: an empty cell is read faster than a zero."""
    if ms < 0.5:
        return ""
    if ms < 1000:
        return f"{ms:.0f} ms"
    if ms < 60_000:
        return f"{ms / 1000:.2f} s" if ms < 10_000 else f"{ms / 1000:.1f} s"
    minutes, seconds = divmod(round(ms / 1000), 60)
    return f"{minutes} min {seconds} s"


def speed(view: RequestView) -> str:
    """Of the answer alone: what came before its first token is waiting. Only streams tell when that was."""
    seconds = (view.total_ms - view.first_byte_ms) / 1000
    if not view.first_byte_ms or view.completion_tokens < 2 or seconds <= 0:
        return ""
    return f"{(view.completion_tokens - 1) / seconds:.1f}"


@dataclass(frozen=True)
class RunningLine:
    key: str
    at: str
    lasts: str
    state: str
    model: str
    model_href: str
    path: str
    who: str
    node: str
    node_href: str
    tokens: str


def running_lines(views: Sequence[RunningView]) -> tuple[RunningLine, ...]:
    return tuple(
        RunningLine(
            key=f"running {view.id}",
            at=view.at,
            lasts=span(view.running_ms) or "0 ms",
            state="waiting" if view.state == "waiting" else "answering" if view.tokens else "running",
            model=view.model,
            model_href=model_href(view.served_by or view.model),
            path=view.path,
            who=view.key or view.key_id,
            node=view.node or view.node_id,
            node_href=node_href(view.node) if view.node else "",
            tokens=f"~{view.tokens:,}" if view.tokens else "",
        )
        for view in views
    )


@dataclass(frozen=True)
class InFlightRow:
    """Requests that one replica serves now, as its ingress reported last."""

    model: str
    model_href: str
    node: str
    node_href: str
    count: int


def in_flight_rows(replicas: Sequence[Mapping[str, Any]], filters: RequestFilter) -> tuple[InFlightRow, ...]:
    counts: dict[tuple[str, str], int] = {}
    for row in replicas:
        model, node = str(row["model_name"]), str(row["node_name"])
        if row["in_flight"] and filters.model in ("", model) and filters.node in ("", node, row["node_id"]):
            counts[model, node] = counts.get((model, node), 0) + int(row["in_flight"])
    return tuple(
        InFlightRow(model, model_href(model), node, node_href(node), count)
        for (model, node), count in sorted(counts.items())
    )


def facts_of(view: RequestView) -> list[tuple[str, str, str]]:
    """Of one request: what, its value, and a link. What is not known is left out."""
    prompt = f"{view.prompt_tokens:,}" if view.prompt_tokens else ""
    answer = f"{'about ' if view.estimated else ''}{view.completion_tokens:,}" if view.completion_tokens else ""
    rate = speed(view)
    found = [
        ("When", view.at, ""),
        ("Model", view.model, model_href(view.model) if view.node_id else ""),
        ("Answered by", view.served_by, ""),
        ("Path", view.path, ""),
        ("Key", view.key or view.key_id, f"/fleet/requests?{urlencode({'key': view.key_id})}"),
        ("Status", str(view.status), ""),
        ("Error", view.error, ""),
        ("What failed", view.error_text, ""),
        ("Ended", _ENDINGS.get(view.ending, view.ending) or ("whole, streamed" if view.streamed else "whole"), ""),
        ("Node", view.node or view.node_id, node_href(view.node) if view.node else ""),
        ("Replica", str(view.replica) if view.node_id else "", ""),
        ("Waited for a free slot", span(view.queue_ms), ""),
        ("Waited for the model", span(view.load_ms), ""),
        ("First token", span(view.first_byte_ms), ""),
        ("Total", span(view.total_ms), ""),
        ("Tokens of the prompt", prompt, ""),
        ("Tokens of the answer", answer, ""),
        ("Tokens per second", rate, ""),
        ("Tries", str(view.tries) if view.tries > 1 else "", ""),
        ("Resumed", f"{times(view.resumed)}, after a replica broke the stream off" if view.resumed else "", ""),
        ("Process", view.process_id, ""),
        ("Revision of the model", view.revision, ""),
        ("Backend", view.digest, ""),
        ("Request id", view.id, ""),
    ]
    return [fact for fact in found if fact[1]]


def _line(view: RequestView, now: datetime) -> RequestLine:
    tried = f"{view.tries} tries" if view.tries > 1 else ""
    resumed = f"resumed {times(view.resumed)}" if view.resumed else ""
    ending = _ENDINGS.get(view.ending, view.ending)
    return RequestLine(
        key=f"{view.id} {view.at}",
        at=view.at,
        when=ago(parse_moment(view.at), now),
        model=view.model,
        served_by=view.served_by,
        path=view.path,
        who=view.key or view.key_id,
        status=view.status,
        failed=is_failure(view.status, view.ending),
        node=view.node or view.node_id,
        queued=span(view.queue_ms),
        loaded=span(view.load_ms),
        first=span(view.first_byte_ms),
        total=span(view.total_ms),
        tokens=_tokens(view),
        speed=speed(view),
        link=f"/fleet/requests/{quote(view.id, safe='')}?{urlencode({'at': view.at})}",
        remark=", ".join(part for part in (ending, resumed, tried, view.error_text or view.error) if part),
        model_href=model_href(view.served_by or view.model) if view.node_id else "",
        node_href=node_href(view.node) if view.node else "",
        title=" · ".join(part for part in (view.id, view.process_id, view.revision[:12], view.digest) if part),
    )


def _tokens(view: RequestView) -> str:
    if not view.prompt_tokens and not view.completion_tokens:
        return ""
    return f"{view.prompt_tokens or '–'} → {'~' if view.estimated else ''}{view.completion_tokens}"
