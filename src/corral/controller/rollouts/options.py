"""What a request says about its rollout: how many nodes at once, how long a soak, which limits. Pure."""

from __future__ import annotations

from corral.kit.durations import format_duration, parse_duration_s
from corral.kit.errors import Invalid
from corral.store.records import RolloutSettings

DEFAULT_MAX_PARALLEL = "25%"
MIN_SOAK_S = 0.1
MAX_SOAK_S = 7 * 24 * 3600.0
MAX_SAMPLES = 2000  # the last requests of each build and class that are compared


def parse_max_parallel(text: str) -> str:
    """`25%` or `3`, as it is stored. Raises Invalid."""
    word = text.strip()
    number, percent = word.removesuffix("%"), word.endswith("%")
    if not (number.isascii() and number.isdigit()) or not 1 <= int(number) <= (100 if percent else 100_000):
        raise Invalid(f"{text[:20]!r} is not a number of nodes: write a share such as 25%, or a number such as 3")
    return f"{int(number)}{'%' if percent else ''}"


def allowed_at_once(max_parallel: str, nodes: int) -> int:
    """At least one, or the rollout would never proceed."""
    if max_parallel.endswith("%"):
        return max(1, nodes * int(max_parallel[:-1]) // 100)
    return max(1, int(max_parallel))


def parse_rollout(
    *, soak: str = "", max_errors: str = "", max_slowdown: float = 0.0, min_requests: int = 0
) -> RolloutSettings:
    """`soak`: `5m`, or `200` for a number of requests. `max_errors`: `2%`. Empty or 0 = the default. Raises Invalid."""
    defaults = RolloutSettings()
    soak_s, soak_requests = _parse_soak(soak.strip())
    if max_slowdown and not 1.0 <= max_slowdown <= 100.0:
        raise Invalid(f"max_slowdown is {max_slowdown:g}: write how many times as slow the median may be, 1 to 100")
    if min_requests and not 5 <= min_requests <= MAX_SAMPLES:
        raise Invalid(f"min_requests is {min_requests}: write 5 to {MAX_SAMPLES}; fewer say nothing about a build")
    if (max_errors or max_slowdown or min_requests) and not soak:
        raise Invalid("limits are for a soak: say how long it takes, for example soak 5m")
    return RolloutSettings(
        soak_s=soak_s,
        soak_requests=soak_requests,
        max_errors=_parse_share(max_errors) if max_errors else defaults.max_errors,
        max_slowdown=max_slowdown or defaults.max_slowdown,
        min_requests=min_requests or defaults.min_requests,
    )


def describe_soak(settings: RolloutSettings) -> str:
    """`5m`, `200 requests`; empty without a soak."""
    if settings.soak_requests:
        return f"{settings.soak_requests} requests"
    return format_duration(settings.soak_s) if settings.soak_s else ""


def _parse_soak(text: str) -> tuple[float, int]:
    if not text:
        return 0.0, 0
    if text.isascii() and text.isdigit() and 0 < int(text) <= MAX_SAMPLES:
        return 0.0, int(text)
    try:
        # A bare number is one of requests, never of seconds.
        seconds = parse_duration_s(text) if text[-1].isalpha() else 0.0
    except ValueError:
        seconds = 0.0
    if not MIN_SOAK_S <= seconds <= MAX_SOAK_S:
        raise Invalid(
            f"{text[:20]!r} is no soak: write a time such as 5m (at most a week), "
            f"or a number of requests up to {MAX_SAMPLES}"
        )
    return seconds, 0


def _parse_share(text: str) -> float:
    number, percent = text.strip().removesuffix("%"), text.strip().endswith("%")
    try:
        share = float(number) / (100 if percent else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise Invalid(f"{text[:20]!r} is no share of requests: write 2% or 0.02")
    return share
