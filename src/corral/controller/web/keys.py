"""API keys as the page shows them: a line per key. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from corral.contract.admin import KeyView
from corral.contract.view import KeyLimits
from corral.controller.web.words import ago, counted, parse_moment, until
from corral.store.tables.receipts import KeyUsage

_MODELS_SHOWN = 4


@dataclass(frozen=True)
class KeyLine:
    id: str
    name: str
    role: str
    state: str
    models: str  # in words, where there is no list of names
    named: tuple[str, ...]  # the models it may use, some of them
    more: int  # beside those
    models_title: str
    limits: str
    expires: str
    expires_at: str
    used: str
    used_at: str
    requests: str
    failed: str
    tokens: str
    own: bool  # the key that looks at this page


def key_lines(
    views: Sequence[KeyView], usage: Mapping[str, KeyUsage], own_id: str, now: datetime
) -> tuple[KeyLine, ...]:
    """Keys that work first; each group newest first, as it comes."""
    lines = [_line(view, usage.get(view.id), own_id, now) for view in views]
    return tuple(sorted(lines, key=lambda line: line.state != "active"))


def _line(view: KeyView, usage: KeyUsage | None, own_id: str, now: datetime) -> KeyLine:
    models = view.models
    expires_at = parse_moment(view.expires_at) if view.expires_at else None
    return KeyLine(
        id=view.id,
        name=view.name,
        role=view.role,
        state=view.state,
        models=_models(models) if view.role in ("inference", "admin") else "",
        named=(models or ())[:_MODELS_SHOWN] if view.role in ("inference", "admin") else (),
        more=max(0, len(models or ()) - _MODELS_SHOWN),
        models_title="" if models is None else ", ".join(models),
        limits=_limits(view.limits),
        expires="never" if expires_at is None else until(expires_at, now) if expires_at > now else ago(expires_at, now),
        expires_at=view.expires_at,
        used=ago(parse_moment(view.last_used_at), now) if view.last_used_at else "never",
        used_at=view.last_used_at,
        requests=f"{usage.requests:,}" if usage else "",
        failed=f"{usage.failed:,} failed" if usage and usage.failed else "",
        tokens=f"{usage.prompt_tokens:,} → {usage.completion_tokens:,}" if usage else "",
        own=view.id == own_id,
    )


def _models(models: tuple[str, ...] | None) -> str:
    if models is None:
        return "every model"
    return "" if models else "no model"


def _limits(limits: KeyLimits | None) -> str:
    if limits is None:
        return "none"
    words = (
        limits.requests_per_min and f"{counted(limits.requests_per_min, 'request', 'requests')}/min",
        limits.tokens_per_min and f"{counted(limits.tokens_per_min, 'token', 'tokens')}/min",
        limits.concurrent and f"{limits.concurrent} at once",
    )
    return ", ".join(word for word in words if word) or "none"
