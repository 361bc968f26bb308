"""Options of the commands that try something new on a part of the requests first: backends and models."""

from __future__ import annotations

from typing import Annotated, Any

from corral.cli.common import declare

MaxErrors = Annotated[
    str,
    declare.Option(
        "--max-errors", metavar="SHARE", help="with --soak: how much the share of failed requests may rise [2%]"
    ),
]
MaxSlowdown = Annotated[
    float | None,
    declare.Option(
        "--max-slowdown", metavar="TIMES", help="with --soak: how many times as slow the median may be [1.5]"
    ),
]
MinRequests = Annotated[
    int | None,
    declare.Option("--min-requests", metavar="N", help="with --soak: requests of the old and the new to judge by [20]"),
]


def soak_fields(*, soak: str, max_errors: str, max_slowdown: float | None, min_requests: int | None) -> dict[str, Any]:
    """Those that were given, as fields of the request."""
    trial = {"soak": soak, "max_errors": max_errors, "max_slowdown": max_slowdown, "min_requests": min_requests}
    for name in ("max_slowdown", "min_requests"):
        value = trial[name]
        if isinstance(value, int | float) and value <= 0:
            raise declare.BadParameter(f"--{name.replace('_', '-')} must be more than 0")
    return {name: value for name, value in trial.items() if value}
