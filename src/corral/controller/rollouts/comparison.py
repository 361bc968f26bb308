"""Compares the requests that a new build, or revision of a model, served with those of the old one. Pure.

Figures are compared per model, because models differ more than builds. Times are compared by rank (Mann-Whitney), so
that one slow request, or ten, decide nothing: the new build is worse only if its median is beyond the limit *and* the
ranks leave no doubt. Shares of failed requests are compared by the lower bound of what the observed share can mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import sqrt
from statistics import median

from corral.store.records import RolloutFigure, RolloutSettings, RolloutWindow

ERRORS, FIRST_TOKEN, ANSWER, SPEED = "errors", "first_token", "answer", "tokens_per_s"
# The same figure is judged every few seconds, so a single look must be almost certain.
CERTAIN = 3.1
_BOUND = 2.33  # of the lower bound of a share: one-sided, 99 %
# Differences of two medians, in seconds (of a speed: per token). The load of two machines alone differs by as much, and
# nobody notices them.
LEAST_SLOWDOWN_S = 0.02
LEAST_SLOWDOWN_OF_A_TOKEN_S = 0.0005
MAX_WINDOWS = 60
_MIN_TOKENS = 2  # for a speed


@dataclass(frozen=True)
class Sample:
    """One request that a process of one of the builds served."""

    at: float  # seconds since 1970
    model: str
    streamed: bool
    failed: bool
    first_s: float  # from when the replica got the request; 0: not streamed
    total_s: float
    tokens: int

    @property
    def speed(self) -> float:
        """Tokens per second, after the first one where that is known; 0: unknown."""
        took = self.total_s - self.first_s
        return self.tokens / took if self.tokens >= _MIN_TOKENS and took > 0 else 0.0


@dataclass(frozen=True)
class Judgement:
    new_requests: int = 0
    old_requests: int = 0
    figures: tuple[RolloutFigure, ...] = ()
    new_windows: tuple[RolloutWindow, ...] = ()
    old_windows: tuple[RolloutWindow, ...] = ()
    fault: str = ""  # of the canary itself, whatever its figures are

    @property
    def verdict(self) -> str:
        """The fault, or the first figure that is worse, in words; empty if none is."""
        return self.fault or next((describe(figure) for figure in self.figures if figure.worse), "")


def compare_builds(
    new: Sequence[Sample], old: Sequence[Sample], settings: RolloutSettings, *, window_s: float
) -> Judgement:
    """Only models that both builds served often enough are judged: no figures at all means too few requests."""
    by_new, by_old = _by_model(new), _by_model(old)
    figures: list[RolloutFigure] = []
    for model in sorted(by_new.keys() & by_old.keys()):
        figures += _compare(model, by_new[model], by_old[model], settings)
    return Judgement(len(new), len(old), tuple(figures), windows_of(new, window_s), windows_of(old, window_s))


def describe(figure: RolloutFigure) -> str:
    """`errors of smollm2: 10.5 % of 200 requests, 0.0 % of 150 of the old one (at most 2.0 % more)`."""
    match figure.name:
        case "errors":
            old, new = f"{100 * figure.old:.1f} %", f"{100 * figure.new:.1f} %"
            limit = f"at most {100 * figure.limit:.1f} % more"
        case "tokens_per_s":
            old, new, limit = f"{figure.old:.1f}", f"{figure.new:.1f}", f"at least 1/{figure.limit:g} of that"
        case _:
            old, new, limit = (
                f"{1000 * figure.old:.0f} ms",
                f"{1000 * figure.new:.0f} ms",
                f"at most {figure.limit:g} times",
            )
    words = {ERRORS: "failed requests", FIRST_TOKEN: "time to first token", ANSWER: "time to answer", SPEED: "tokens/s"}
    return (
        f"{words[figure.name]} of {figure.model}: {new} in {figure.new_requests} requests, "
        f"{old} in {figure.old_requests} of the old one ({limit})"
    )


def _compare(
    model: str, new: Sequence[Sample], old: Sequence[Sample], settings: RolloutSettings
) -> Iterable[RolloutFigure]:
    if min(len(new), len(old)) >= settings.min_requests:
        yield _errors(model, new, old, settings)
    times: tuple[tuple[str, Callable[[Sample], float]], ...] = (
        (FIRST_TOKEN, lambda each: each.first_s),
        (ANSWER, lambda each: 0.0 if each.streamed else each.total_s),
        (SPEED, lambda each: each.speed),
    )
    for name, value in times:
        new_values = [found for each in new if not each.failed and (found := value(each)) > 0]
        old_values = [found for each in old if not each.failed and (found := value(each)) > 0]
        if min(len(new_values), len(old_values)) >= settings.min_requests:
            yield _times(name, model, new_values, old_values, settings.max_slowdown)


def _errors(model: str, new: Sequence[Sample], old: Sequence[Sample], settings: RolloutSettings) -> RolloutFigure:
    new_values, old_values = _share(new), _share(old)
    worse = lower_bound(new_values, len(new)) > old_values + settings.max_errors
    return RolloutFigure(
        name=ERRORS,
        model=model,
        old=old_values,
        new=new_values,
        old_requests=len(old),
        new_requests=len(new),
        limit=settings.max_errors,
        worse=worse,
    )


def _times(name: str, model: str, new: Sequence[float], old: Sequence[float], limit: float) -> RolloutFigure:
    slower = -rank_certainty(new, old) if name == SPEED else rank_certainty(new, old)
    old_values, new_values = median(old), median(new)
    if name == SPEED:
        ratio, is_noticed = old_values / new_values, 1 / new_values - 1 / old_values > LEAST_SLOWDOWN_OF_A_TOKEN_S
    else:
        ratio, is_noticed = new_values / old_values, new_values - old_values > LEAST_SLOWDOWN_S
    return RolloutFigure(
        name=name,
        model=model,
        old=old_values,
        new=new_values,
        old_requests=len(old),
        new_requests=len(new),
        limit=limit,
        certainty=round(slower, 2),
        worse=ratio > limit and slower > CERTAIN and is_noticed,
    )


def rank_certainty(new: Sequence[float], old: Sequence[float]) -> float:
    """How surely values of `new` are larger, in standard deviations of the Mann-Whitney statistic under "no
    difference"; ties share their ranks."""
    n, m = len(new), len(old)
    total = n + m
    ranked = sorted([(value, True) for value in new] + [(value, False) for value in old])
    rank_sum, ties, place = 0.0, 0.0, 0
    for _, group in groupby(ranked, key=lambda pair: pair[0]):
        same = [is_new for _, is_new in group]
        rank_sum += sum(same) * (place + (len(same) + 1) / 2)
        ties += len(same) ** 3 - len(same)
        place += len(same)
    variance = n * m / 12 * (total + 1 - ties / (total * (total - 1)))
    return (rank_sum - n * (n + 1) / 2 - n * m / 2) / sqrt(variance) if variance > 0 else 0.0


def lower_bound(share: float, count: int) -> float:
    """Of Wilson's interval: the smallest share that still explains the observed one."""
    square = _BOUND * _BOUND
    spread = _BOUND * sqrt((share * (1 - share) + square / (4 * count)) / count)
    return max(0.0, (share + square / (2 * count) - spread) / (1 + square / count))


def windows_of(samples: Sequence[Sample], window_s: float) -> tuple[RolloutWindow, ...]:
    """The last ones, in order of time."""
    by_window: dict[int, list[Sample]] = {}
    for each in samples:
        by_window.setdefault(int(each.at // window_s), []).append(each)
    return tuple(_window(number * window_s, by_window[number]) for number in sorted(by_window)[-MAX_WINDOWS:])


def _window(at: float, samples: Sequence[Sample]) -> RolloutWindow:
    firsts = [found for each in samples if not each.failed and (found := each.first_s or each.total_s) > 0]
    speeds = [found for each in samples if not each.failed and (found := each.speed) > 0]
    return RolloutWindow(
        at,
        len(samples),
        sum(each.failed for each in samples),
        round(1000 * median(firsts), 1) if firsts else 0.0,
        round(median(speeds), 1) if speeds else 0.0,
    )


def _by_model(samples: Iterable[Sample]) -> dict[str, list[Sample]]:
    found: dict[str, list[Sample]] = {}
    for each in samples:
        found.setdefault(each.model, []).append(each)
    return found


def _share(samples: Sequence[Sample]) -> float:
    return sum(each.failed for each in samples) / len(samples)
