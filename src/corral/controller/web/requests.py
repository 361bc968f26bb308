"""Receipts as the page shows them: a line per request. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from urllib.parse import urlencode

from corral.contract.receipts import RequestView
from corral.controller.web.links import model_href, node_href
from corral.controller.web.words import ago, parse_moment

_ENDINGS = {"client_left": "the client left", "upstream_broke": "the replica broke off"}


@dataclass(frozen=True)
class RequestFilter:
    """Which requests a person wants to see: for this model, only failed ones, those before this one."""

    model: str = ""
    failed: bool = False
    before: str = ""

    def query(self, **changes: object) -> str:
        wanted = {"model": self.model, "failed": self.failed, "before": self.before} | changes
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
    title: str  # what tells it from others: its id, and what exactly answered


def request_lines(views: tuple[RequestView, ...], now: datetime) -> tuple[RequestLine, ...]:
    return tuple(_line(view, now) for view in views)


def span(ms: float) -> str:
    """Nothing for what took no time: an empty cell is read faster than a zero."""
    if ms < 0.5:
        return ""
    return f"{ms:.0f} ms" if ms < 10_000 else f"{ms / 1000:.1f} s"


def _line(view: RequestView, now: datetime) -> RequestLine:
    tried = f"{view.tries} tries" if view.tries > 1 else ""
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
        failed=view.status >= 400 or view.ending == "upstream_broke",
        node=view.node or view.node_id,
        queued=span(view.queue_ms),
        loaded=span(view.load_ms),
        first=span(view.first_byte_ms),
        total=span(view.total_ms),
        tokens=_tokens(view),
        remark=", ".join(part for part in (ending, tried) if part),
        model_href=model_href(view.served_by or view.model) if view.node_id else "",
        node_href=node_href(view.node) if view.node else "",
        title=" · ".join(part for part in (view.id, view.process_id, view.revision[:12], view.digest) if part),
    )


def _tokens(view: RequestView) -> str:
    if not view.prompt_tokens and not view.completion_tokens:
        return ""
    return f"{view.prompt_tokens or '–'} → {'~' if view.estimated else ''}{view.completion_tokens}"
