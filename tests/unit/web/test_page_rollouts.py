"""Rollouts on the page: what an admin may do, and the curves of both builds."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from corral.contract.rollouts import RolloutClassView, RolloutFigureView, RolloutView, RolloutWindowView
from corral.controller.web.pages import load_pages
from corral.controller.web.rollouts import HEIGHT, WIDTH, curves_of, rollout_lines

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def window(at: float, first_ms: float = 100.0, errors: int = 0, speed: float = 50.0) -> RolloutWindowView:
    return RolloutWindowView(at, 10, errors, first_ms, speed)


def rollout(phase: str = "soak", **more: Any) -> RolloutView:
    return RolloutView("0b1c2d3e-4", "vllm", phase, "2026-01-01T11:50:00Z", soak="5m", **more)


@pytest.mark.parametrize(
    ("view", "actions"),
    [
        (rollout(), ("pause", "promote", "abort")),
        (rollout(paused_by="ann"), ("resume", "promote", "abort")),
        (rollout(promoted_by="ann"), ("pause", "abort")),
        (rollout("waves"), ("pause", "abort")),
        (rollout("reverted", verdict="slow"), ()),
        (rollout("done"), ()),
    ],
)
def test_what_an_admin_may_do(view: RolloutView, actions: tuple[str, ...]) -> None:
    (line,) = rollout_lines([view], NOON)
    assert line.actions == actions


def test_those_in_progress_come_first_and_of_the_others_the_last_few() -> None:
    views = [rollout("done") for _ in range(9)] + [rollout("soak")]
    lines = rollout_lines(views, NOON)
    assert [line.words for line in lines] == ["soaking", *["done"] * 4]


def test_both_builds_are_drawn_in_one_box() -> None:
    new = [window(1000 + 10 * n, 300) for n in range(4)]
    old = [window(970 + 10 * n, 100) for n in range(4)]
    errors, first, speed = curves_of(new, old)
    assert (first.title, first.most) == ("time to first token", "300 ms")
    assert first.words == "time to first token: new 300 ms, old 100 ms at last"
    points = [tuple(map(float, point.split(","))) for point in f"{first.new} {first.old}".split()]
    assert len(points) == 8
    assert {x for x, _ in points} <= {x for x, _ in points if 0 <= x <= WIDTH}
    assert all(0 <= y <= HEIGHT for _, y in points)
    assert points[0][1] < points[-1][1], "the slower one is higher up"
    assert errors.new
    assert speed.most == "50"


def test_one_point_is_no_curve() -> None:
    assert curves_of([window(1000)], []) == ()
    assert curves_of([], []) == ()


def test_the_page_says_which_figure_is_worse_and_escapes_names() -> None:
    figure = RolloutFigureView("errors", "<b>m</b>", 0.0, 0.1, 50, 50, 0.02, 0.0, True, "failed requests of <b>m</b>")
    state = RolloutClassView("cpu, 16 GiB", ("barn", "byre"), "barn", "soaking", figures=(figure,), deaths=1)
    view = rollout(classes=(state,))
    values = {"rollouts": rollout_lines([view], NOON), "admin": True, "width": WIDTH, "height": HEIGHT}
    text = load_pages().text("_rollouts.html", **values)
    assert "✗ worse: failed requests of &lt;b&gt;m&lt;/b&gt;" in text
    assert "cpu, 16 GiB · 2 nodes" in text
    assert "soaking; barn goes first; 1 process ended by itself" in text
    assert text.count('data-act="rollout"') == 3
    assert "data-act" not in load_pages().text("_rollouts.html", **(values | {"admin": False}))
