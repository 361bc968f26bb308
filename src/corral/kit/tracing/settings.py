"""Settings of traces, the same for every process that exports them."""

from __future__ import annotations

from dataclasses import dataclass

from corral.kit.settings import Seconds, plain_http_url, positive, setting


def _endpoint(value: str) -> str | None:
    if not value:
        return None
    return plain_http_url(value, example="http://collector:4318", secret_flags="a header with --traces-headers")


def _share(text: str) -> float:
    try:
        return float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        raise ValueError(f"{text!r} is no share; give one such as 0.01 or 1%") from None


def _is_share(value: float) -> str | None:
    return None if 0 <= value <= 1 else "must be between 0 and 1"


def _headers(values: tuple[str, ...]) -> str | None:
    return None if all("=" in each for each in values) else "each header is written NAME=VALUE"


@dataclass(frozen=True)
class TraceSettings:
    traces_endpoint: str = setting(
        "OTLP/HTTP collector of traces, such as http://collector:4318; empty = no traces",
        default="",
        parse=lambda text: text.strip().rstrip("/").removesuffix("/v1/traces"),
        check=_endpoint,
    )
    traces_sample: float = setting(
        "share of requests to trace, such as 0.01 or 1%; a gateway decides for requests without a traceparent",
        default=0.01,
        parse=_share,
        check=_is_share,
    )
    traces_follow_clients: bool = setting(
        "trace every request that a client marks as sampled in its traceparent", default=True
    )
    traces_headers: tuple[str, ...] = setting(
        "headers for the collector, such as its key: NAME=VALUE,NAME=VALUE", default=(), secret=True, check=_headers
    )
    traces_interval_s: Seconds = setting(
        "interval between sending spans", default=Seconds(2), check=positive, advanced=True
    )
    traces_limit: int = setting(
        "maximum number of traced requests kept while the collector cannot be reached; further ones are only counted",
        default=4096,
        check=positive,
        advanced=True,
    )
