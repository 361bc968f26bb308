"""No secret in any log: the last net, tried with one of each kind."""

from __future__ import annotations

import io
import json
import logging
from pathlib import Path

import nkeys
import pytest
import structlog

from corral.kit.log import configure_logging, get_log, mask_secrets, printable
from corral.kit.secrets import PREFIXES, new_secret

SEED = nkeys.encode_seed(b"\x07" * 32, nkeys.PREFIX_BYTE_USER).decode()
JWT = "eyJ0eXAiOiJKV1QiLCJhbGciOiJlZDI1NTE5LW5rZXkifQ.eyJhIjoxfQ.c2lnbmF0dXJl"
SECRETS = [*(new_secret(prefix) for prefix in PREFIXES), SEED, JWT]


@pytest.mark.parametrize("secret", SECRETS, ids=[*PREFIXES, "nkeys seed", "JWT"])
def test_each_kind_of_secret_is_masked(secret: str) -> None:
    assert secret not in mask_secrets(f"before {secret} after")
    assert mask_secrets(f"before {secret} after").endswith("after")


def test_a_password_in_a_url_is_masked_and_the_host_is_not() -> None:
    assert mask_secrets("nats://user:pass@bus.example:4222") == "nats://***@bus.example:4222"


def test_a_token_in_a_url_is_masked_too() -> None:
    assert mask_secrets("nats://s3cret@bus.example:4222, http://x/a@b") == "nats://***@bus.example:4222, http://x/a@b"


def test_plain_words_survive() -> None:
    line = "node w-1 is healthy at https://10.0.0.7:50050 after 3 tries"
    assert mask_secrets(line) == line


def test_secrets_in_fields_exceptions_and_foreign_loggers_are_masked() -> None:
    stream = io.StringIO()
    before = logging.getLogger().handlers[:]
    try:
        configure_logging(role="test", json=True, stream=stream)
        log = get_log("t")
        for secret in SECRETS:
            log.info("plain", value=secret, many=[secret], table={"k": secret}, error=ValueError(secret))
            log.info("odd", raw=secret.encode(), some={secret}, place=Path(secret))
            logging.getLogger("foreign").warning("said %s", secret)
            try:
                raise RuntimeError(secret)
            except RuntimeError:
                log.exception("failed")
    finally:
        logging.getLogger().handlers[:] = before
        structlog.reset_defaults()
        structlog.contextvars.clear_contextvars()
    written = stream.getvalue()
    assert len(written.splitlines()) == 4 * len(SECRETS)
    assert all(json.loads(line)["role"] == "test" for line in written.splitlines())
    for secret in SECRETS:
        assert secret not in written


@pytest.mark.parametrize("as_json", [False, True])
def test_nobody_writes_a_line_of_our_log_or_steers_our_terminal(as_json: bool) -> None:
    stream = io.StringIO()
    before = logging.getLogger().handlers[:]
    forged = "x\n2026-11-15T00:00:00Z [info] node deleted node=all"
    try:
        configure_logging(role="test", json=as_json, stream=stream)
        log = get_log("t")
        log.info("request", path=forged, name="a\x1b[2J\x9b31m\u202e", many=["\x1b[2J"])
        log.warning(f"waiting for approval: {forged}\x1b[2J")
        logging.getLogger("foreign").warning("said %s", forged + "\r")
    finally:
        logging.getLogger().handlers[:] = before
        structlog.reset_defaults()
        structlog.contextvars.clear_contextvars()
    written = stream.getvalue()
    assert len(written.splitlines()) == 3
    assert all(letter.isprintable() or letter == "\n" for letter in written)


def test_a_traceback_keeps_its_lines_and_nothing_else() -> None:
    assert printable("Traceback\n  File\tx\x1b[2J\r", keep_lines=True) == "Traceback\n  File\tx\\x1b[2J\\r"
    assert printable("grün – 日本") == "grün – 日本"
