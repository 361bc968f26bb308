"""No secret in any log: the last net, tried with one of each kind."""

from __future__ import annotations

import io
import json
import logging

import nkeys
import pytest
import structlog

from corral.kit.log import configure_logging, get_log, mask_secrets
from corral.kit.secrets import PREFIXES, new_secret

SEED = nkeys.encode_seed(b"\x07" * 32, nkeys.PREFIX_BYTE_USER).decode()
JWT = "eyJ0eXAiOiJKV1QiLCJhbGciOiJlZDI1NTE5LW5rZXkifQ.eyJhIjoxfQ.c2lnbmF0dXJl"
SECRETS = [*(new_secret(prefix) for prefix in PREFIXES), SEED, JWT]


@pytest.mark.parametrize("secret", SECRETS)
def test_each_kind_of_secret_is_masked(secret: str) -> None:
    assert secret not in mask_secrets(f"before {secret} after")
    assert mask_secrets(f"before {secret} after").endswith("after")


def test_a_password_in_a_url_is_masked_and_the_host_is_not() -> None:
    assert mask_secrets("nats://user:pass@bus.example:4222") == "nats://***@bus.example:4222"


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
    assert len(written.splitlines()) == 3 * len(SECRETS)
    assert all(json.loads(line)["role"] == "test" for line in written.splitlines())
    for secret in SECRETS:
        assert secret not in written
