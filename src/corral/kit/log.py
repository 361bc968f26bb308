"""Logging: constant messages, variable fields, no secrets. Console lines for people, JSON lines for programs."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import MutableMapping
from typing import Any, TextIO

import structlog

from corral.kit.redact import redact_urls
from corral.kit.secrets import PLAYGROUND, PREFIXES

_SECRET = re.compile(
    r"\b(" + "|".join(PREFIXES) + r")[a-z2-7]{16,}"  # our own keys and tokens
    r"|\b" + PLAYGROUND + r"[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]+"
    r"|\bS[AUOCNX][A-Z2-7]{50,}\b"  # nkeys seeds
    r"|\beyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+"  # JWTs
    r"|(?i:(?<=bearer ))[A-Za-z0-9._~+/=-]{8,}"
)


_SEVERAL_LINES = frozenset({"exception", "stack"})


def mask_secrets(text: str) -> str:
    """Replace texts that look like our secrets: the last protection against code that logs one by mistake."""
    return _SECRET.sub(lambda found: (found.group(1) or "") + "***", redact_urls(text))


def printable(text: str, *, keep_lines: bool = False) -> str:
    """Escape control characters (`\\x1b`): a foreign text must neither forge a log line nor change the terminal."""
    if text.isprintable():
        return text
    kept = "\n\t" if keep_lines else ""
    return "".join(
        letter if letter.isprintable() or letter in kept else letter.encode("unicode_escape").decode()
        for letter in text
    )


def _clean_event(_logger: Any, _name: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    for key, value in event.items():
        if key.startswith("_") or isinstance(value, bool | int | float | None):
            continue
        event[key] = printable(mask_secrets(str(value)), keep_lines=key in _SEVERAL_LINES)
    return event


def _processors() -> list[Any]:
    """What each event goes through before it is rendered."""
    return [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
        _clean_event,
    ]


def _formatter(*renderers: Any) -> logging.Formatter:
    return structlog.stdlib.ProcessorFormatter(
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderers],
        foreign_pre_chain=_processors(),
    )


def line_formatter() -> logging.Formatter:
    """The console's lines without colours, and without the time, for a reader that has it beside the line."""

    def drop_time(_logger: Any, _name: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        event.pop("timestamp", None)
        return event

    return _formatter(drop_time, structlog.dev.ConsoleRenderer(colors=False, pad_event_to=0))


def configure_logging(*, role: str, level: str = "info", json: bool = False, stream: TextIO | None = None) -> None:
    """Call once, at the start of a process. Libraries that use the standard logging get the same format."""
    stream = stream or sys.stderr
    renderer: Any = (
        structlog.processors.JSONRenderer()
        if json
        else structlog.dev.ConsoleRenderer(colors=stream.isatty(), pad_event_to=34)
    )
    structlog.configure(
        processors=[*_processors(), structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(stream)
    handler.setFormatter(_formatter(renderer))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for noisy in ("nats", "asyncio", "uvicorn", "alembic"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    structlog.contextvars.bind_contextvars(role=role)


def get_log(name: str) -> Any:
    """A logger for one module: `log.info("replica ready", model=model)`."""
    return structlog.get_logger(name)
