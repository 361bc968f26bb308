"""Series as small line charts: paths, a scale that fits, a title per interval, and a sentence for screen readers. Pure;
`_charts.html` writes the SVG."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime

from corral.contract.samples import SamplePoint, SampleSeries
from corral.controller.samples.series import RANGES
from corral.controller.web.words import size

WIDTH, HEIGHT = 300.0, 72.0
_TOP = 4.0  # the line's own width must not be cut off
MAX_SLICES = 60  # with a title each

Words = Callable[[float], str]
Read = Callable[[SamplePoint], float | None]


@dataclass(frozen=True)
class ChartLine:
    name: str
    css: str
    path: str
    area: str  # below the first line


@dataclass(frozen=True)
class Slice:
    x: str
    width: str
    title: str


@dataclass(frozen=True)
class Chart:
    key: str
    title: str
    value: str  # the latest
    note: str  # beside it
    top: str  # what the upper edge stands for
    lines: tuple[ChartLine, ...]
    slices: tuple[Slice, ...]
    described: str
    begin: str


@dataclass(frozen=True)
class LineSpec:
    name: str
    read: Read
    css: str = "first"


@dataclass(frozen=True)
class ChartSpec:
    key: str
    title: str
    words: Words
    lines: tuple[LineSpec, ...]
    floor: float = 1.0  # the scale shows at least this much
    whole: Read | None = None  # what can be at most, where that is known: the upper edge


@dataclass(frozen=True)
class RangeLink:
    key: str
    words: str
    chosen: bool


def range_links(chosen: str) -> tuple[RangeLink, ...]:
    return tuple(RangeLink(each.key, each.words, each.key == chosen) for each in RANGES.values())


def chart_of(spec: ChartSpec, series: SampleSeries, begin: str) -> Chart:
    """`begin`: what the left edge is, in words."""
    values = [[line.read(point) for point in series.points] for line in spec.lines]
    most = max((value for line in values for value in line if value is not None), default=0.0)
    whole = max((spec.whole(point) or 0.0 for point in series.points), default=0.0) if spec.whole else 0.0
    top = max(most, whole) if whole else nice_ceiling(most, spec.floor)
    since, until = datetime.fromisoformat(series.since), datetime.fromisoformat(series.until)
    span_s = max(1.0, (until - since).total_seconds())
    places = [
        ((datetime.fromisoformat(point.at) - since).total_seconds() + point.seconds) / span_s * WIDTH
        for point in series.points
    ]
    step = series.step_s / span_s * WIDTH
    lines = tuple(
        ChartLine(line.name, line.css, *_paths(places, given, top, step))
        for line, given in zip(spec.lines, values, strict=True)
    )
    latest = [given[-1] if given else None for given in values]
    return Chart(
        key=spec.key,
        title=spec.title,
        value=spec.words(latest[0]) if latest[0] is not None else "–",
        note=_note(spec, latest),
        top=spec.words(top),
        lines=lines,
        slices=_slices(spec, series, values, places, step),
        described=_described(spec, values[0], begin),
        begin=begin,
    )


def _note(spec: ChartSpec, latest: Sequence[float | None]) -> str:
    """What stands behind the first value where there are several: `0.66` `answers, 0.1 prompts`."""
    if len(spec.lines) == 1 or latest[0] is None:
        return ""
    rest = zip(spec.lines[1:], latest[1:], strict=True)
    return ", ".join(
        (spec.lines[0].name, *(f"{spec.words(value)} {line.name}" for line, value in rest if value is not None))
    )


def nice_ceiling(value: float, floor: float) -> float:
    """The next of 1, 2, 5, 10, 20 … that is not below."""
    wanted = max(value, floor)
    unit = 10.0 ** math.floor(math.log10(wanted))
    return next(unit * step for step in (1, 2, 5, 10) if unit * step >= wanted * 0.999999)


def number(value: float) -> str:
    """Three digits at most: `0.25`, `3.4`, `120`, `1.2k`, `3M`."""
    for unit, mark in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= unit * 0.9995:
            return f"{_digits(value / unit)}{mark}"
    return _digits(value)


def milliseconds(value: float) -> str:
    if value >= 999.5:
        return f"{_digits(value / 1000)} s"
    return f"{_digits(value)} ms"


def _digits(value: float) -> str:
    places = 0 if value >= 99.5 else 1 if value >= 9.95 else 2
    return f"{round(value, places):.{places}f}".rstrip("0").rstrip(".") if places else f"{value:.0f}"


def _paths(places: Sequence[float], values: Sequence[float | None], top: float, step: float) -> tuple[str, str]:
    """The line, and what lies below it. A gap of more than an interval and a half is left open."""
    runs: list[list[tuple[float, float]]] = []
    before = -math.inf
    for x, value in zip(places, values, strict=True):
        if value is None:
            continue
        if x - before > 1.5 * step:
            runs.append([])
        runs[-1].append((x, HEIGHT - (HEIGHT - _TOP) * min(1.0, max(0.0, value) / top)))
        before = x
    # A single point is drawn as long as its interval.
    runs = [run if len(run) > 1 else [(max(0.0, run[0][0] - step), run[0][1]), *run] for run in runs]
    line = "".join("M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in run) for run in runs)
    area = "".join(
        f"M{run[0][0]:.1f} {HEIGHT:g}L{'L'.join(f'{x:.1f} {y:.1f}' for x, y in run)}L{run[-1][0]:.1f} {HEIGHT:g}Z"
        for run in runs
    )
    return line, area


def _slices(
    spec: ChartSpec,
    series: SampleSeries,
    values: Sequence[Sequence[float | None]],
    places: Sequence[float],
    step: float,
) -> tuple[Slice, ...]:
    every = max(1, math.ceil(len(places) / MAX_SLICES))
    found = []
    for index in range(len(places) - 1, -1, -every):
        shown = [
            f"{line.name} {spec.words(value)}"
            for line, given in zip(spec.lines, values, strict=True)
            if (value := given[index]) is not None
        ]
        at = datetime.fromisoformat(series.points[index].at)
        when = f"{at:%H:%M}" if series.step_s < 3600 else f"{at:%b %d, %H:%M}"
        width = step * every
        left = max(0.0, places[index] - width)
        found.append(
            Slice(f"{left:.1f}", f"{places[index] - left:.1f}", f"{when} UTC: {', '.join(shown) or 'nothing'}")
        )
    return tuple(reversed(found))


def _described(spec: ChartSpec, values: Sequence[float | None], begin: str) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return f"{spec.title}: nothing measured"
    least, most, last = (spec.words(value) for value in (min(known), max(known), known[-1]))
    return f"{spec.title}: now {last}; between {least} and {most} since {begin}"


def _rate(read: Callable[[SamplePoint], float]) -> Read:
    return lambda point: read(point) / point.seconds


def _share_of_errors(point: SamplePoint) -> float | None:
    return 100 * point.errors / point.requests if point.requests else 0.0


TOKENS = ChartSpec(
    "tokens", "Tokens per second", number,
    (LineSpec("answers", _rate(lambda point: point.completion_tokens)),
     LineSpec("prompts", _rate(lambda point: point.prompt_tokens), "second")), floor=10,
)  # fmt: skip
REQUESTS = ChartSpec(
    "requests", "Requests per second", number, (LineSpec("requests", _rate(lambda point: point.requests)),)
)
ERRORS = ChartSpec(
    "errors", "Errors", lambda value: f"{_digits(value)} %", (LineSpec("failed", _share_of_errors, "bad"),), floor=5
)
FIRST_TOKEN = ChartSpec(
    "first-token", "Time to first token", milliseconds,
    (LineSpec("p50", lambda point: point.first_token_p50_ms),
     LineSpec("p95", lambda point: point.first_token_p95_ms, "second")), floor=100,
)  # fmt: skip
QUEUE = ChartSpec(
    "queue", "Waiting requests", number,
    (LineSpec("mean", lambda point: point.waiting),
     LineSpec("peak", lambda point: point.waiting_most, "second")), floor=5,
)  # fmt: skip
IN_FLIGHT = ChartSpec(
    "in-flight", "Requests in flight", number, (LineSpec("in flight", lambda point: point.in_flight),), floor=5
)
RAM = ChartSpec(
    "ram", "RAM used", lambda value: size(int(value)), (LineSpec("used", lambda point: point.ram_used_bytes),), 2**30,
    lambda point: point.ram_bytes,
)  # fmt: skip
DEVICES = ChartSpec(
    "devices", "Device memory used", lambda value: size(int(value)),
    (LineSpec("used", lambda point: point.device_used_bytes),), 2**30, lambda point: point.device_bytes,
)  # fmt: skip
TEMPERATURE = ChartSpec(
    "temperature", "Temperature", lambda value: f"{value:.0f} °C",
    (LineSpec("hottest device", lambda point: point.temperature_c, "second"),), floor=100,
)  # fmt: skip
POWER = ChartSpec(
    "power", "Power", lambda value: f"{value:.0f} W", (LineSpec("all devices", lambda point: point.power_w),), 100
)
OF_FLEET = (TOKENS, REQUESTS, ERRORS, FIRST_TOKEN, QUEUE, IN_FLIGHT)
OF_NODE = (DEVICES, RAM, IN_FLIGHT, TEMPERATURE, POWER)


def charts_of(specs: Sequence[ChartSpec], series: SampleSeries, span: str) -> tuple[Chart, ...]:
    begin = f"{RANGES[span].words} ago"
    return tuple(chart_of(spec, series, begin) for spec in specs)


def measured(charts: Sequence[Chart]) -> tuple[Chart, ...]:
    """Those that have something to show."""
    return tuple(chart for chart in charts if any(line.path for line in chart.lines))
