"""Rollouts as the page shows them: the hardware classes, the figures, and a curve of old and new. Pure; the server
draws the curves, as points of an SVG."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime

from corral.contract.rollouts import RolloutClassView, RolloutView, RolloutWindowView
from corral.controller.web.words import ago, counted, parse_moment

WIDTH, HEIGHT = 260, 60
SHOWN = 5
OVER = ("done", "reverted", "ended")
_PHASES = {
    "fetching": "fetching",
    "canary": "first nodes",
    "soak": "soaking",
    "waves": "switching",
    "done": "done",
    "reverted": "reverted",
    "ended": "ended",
}
_STATES = {"fetching": "under_way", "canary": "under_way", "soak": "waiting", "waves": "under_way"}


@dataclass(frozen=True)
class Curve:
    """One figure over time: `new` and `old` are the points of two lines, in a box of WIDTH by HEIGHT."""

    title: str
    new: str
    old: str
    most: str  # the value at the top
    words: str  # for those who do not see it


@dataclass(frozen=True)
class ClassLine:
    name: str
    state: str
    words: str
    requests: str
    figures: tuple[tuple[str, bool], ...]  # words, and whether it is worse
    curves: tuple[Curve, ...]


@dataclass(frozen=True)
class RolloutLine:
    id: str
    what: str
    state: str
    words: str
    message: str
    soak: str
    started_at: str
    started: str
    classes: tuple[ClassLine, ...]
    new: str  # what the curves are of
    old: str
    plan: str
    kind: str  # model, backend
    actions: tuple[str, ...]  # of an admin


def rollout_lines(views: Sequence[RolloutView], now: datetime) -> list[RolloutLine]:
    """Those in progress, then the last few that are over; both the newest first."""
    going = [view for view in views if view.phase not in OVER]
    over = [view for view in views if view.phase in OVER]
    return [_line(view, now) for view in (going + over)[: max(SHOWN, len(going))]]


def _line(view: RolloutView, now: datetime) -> RolloutLine:
    return RolloutLine(
        id=view.operation_id,
        what=f"new revision of {view.model}" if view.model else f"upgrade {view.backend}",
        new=f"new {_noun(view)}",
        old=f"old {_noun(view)}",
        plan=view.plan,
        kind="model" if view.model else "backend",
        state="failed" if view.phase == "reverted" else _STATES.get(view.phase, "completed"),
        words="paused" if view.paused_by and view.phase not in OVER else _PHASES.get(view.phase, view.phase),
        message=view.message,
        soak=f"soak {view.soak}" if view.soak else "no soak",
        started_at=view.started_at,
        started=ago(parse_moment(view.started_at), now),
        classes=tuple(_class(view, each) for each in view.classes),
        actions=_actions(view),
    )


def _noun(view: RolloutView) -> str:
    return "version" if view.is_corral else "revision" if view.model else "build"


def _actions(view: RolloutView) -> tuple[str, ...]:
    if view.phase in OVER:
        return ()
    promote = ("promote",) if view.soak and not view.promoted_by and view.phase != "waves" else ()
    return ("resume" if view.paused_by else "pause", *promote, "abort")


def _class(view: RolloutView, each: RolloutClassView) -> ClassLine:
    details = [_first(view, each), each.passed or each.waiting]
    if view.model and each.state == "soaking":
        details.append(f"{view.percent} % of the requests")
    if each.deaths:
        details.append(counted(each.deaths, "process ended by itself", "processes ended by themselves"))
    return ClassLine(
        name=each.name if view.model else f"{each.name} · {counted(len(each.nodes), 'node', 'nodes')}",
        state={"passed": "success", "soaking": "waiting", "canary": "under_way"}.get(each.state, "queued"),
        words="; ".join(detail for detail in (each.state, *details) if detail),
        requests=f"{each.new_requests} requests of the new {_noun(view)}, {each.old_requests} of the old one",
        figures=tuple((figure.words, figure.worse) for figure in each.figures),
        curves=curves_of(each.new_windows, each.old_windows),
    )


def _first(view: RolloutView, each: RolloutClassView) -> str:
    if not each.canary:
        return ""
    return f"on {each.canary}" if view.model else f"{each.canary} goes first"


def curves_of(new: Sequence[RolloutWindowView], old: Sequence[RolloutWindowView]) -> tuple[Curve, ...]:
    """Of the time in which the new build served, and as long before. A curve needs two points of one build."""
    if new:
        begin = 2 * new[0].at - new[-1].at - 60
        old = [window for window in old if window.at >= begin]
    measures: tuple[tuple[str, str, Callable[[RolloutWindowView], float | None]], ...] = (
        ("failed requests", "%", lambda window: 100 * window.errors / window.requests if window.requests else None),
        ("time to first token", "ms", lambda window: window.first_token_ms or None),
        ("tokens/s", "", lambda window: window.tokens_per_s or None),
    )
    return tuple(
        curve for title, unit, value in measures if (curve := _curve(title, unit, value, new, old)) is not None
    )


def _curve(
    title: str,
    unit: str,
    value: Callable[[RolloutWindowView], float | None],
    new: Sequence[RolloutWindowView],
    old: Sequence[RolloutWindowView],
) -> Curve | None:
    new_points = [(window.at, found) for window in new if (found := value(window)) is not None]
    old_points = [(window.at, found) for window in old if (found := value(window)) is not None]
    if max(len(new_points), len(old_points)) < 2:
        return None
    times = [at for at, _ in new_points + old_points]
    first, last = min(times), max(times)
    most = max(found for _, found in new_points + old_points) or 1.0

    def points(pairs: Sequence[tuple[float, float]]) -> str:
        return " ".join(
            f"{WIDTH * (at - first) / (last - first or 1):.1f},{HEIGHT - (HEIGHT - 4) * found / most - 2:.1f}"
            for at, found in pairs
        )

    ends = [
        f"{name} {pairs[-1][1]:.0f} {unit}".strip()
        for name, pairs in (("new", new_points), ("old", old_points))
        if pairs
    ]
    return Curve(
        title,
        points(new_points),
        points(old_points),
        f"{most:.0f} {unit}".strip(),
        f"{title}: {', '.join(ends)} at last",
    )
