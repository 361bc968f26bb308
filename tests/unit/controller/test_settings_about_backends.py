"""Settings of installing: the contract's own names count too, and what makes no sense is refused by name."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import pytest

from corral.controller.backends.outcomes import RetryPolicy
from corral.controller.settings import ControllerSettings
from corral.controller.wiring.backends import gallery_options, registry_settings
from corral.gallery.galleries import Gallery
from corral.kit.settings import BadSettings, Seconds, read_settings


def read(**env: str) -> ControllerSettings:
    return read_settings(ControllerSettings, flags={}, env=env)


def galleries_of(settings: ControllerSettings) -> Sequence[Gallery]:
    return gallery_options(settings, settings.gallery.galleries).galleries


def test_a_quarter_of_an_hour_unless_somebody_says_otherwise() -> None:
    backends = read().backends
    assert (backends.backend_install_timeout_s, backends.backend_upgrade_timeout_s) == (Seconds(900), Seconds(900))


@pytest.mark.parametrize("prefix", ["CORRAL_", "LOCALAI_NATS_"])
def test_both_names_of_the_timeouts(prefix: str) -> None:
    env = {f"{prefix}BACKEND_INSTALL_TIMEOUT": "5s", f"{prefix}BACKEND_UPGRADE_TIMEOUT": "1h30m"}
    backends = read(**env).backends
    assert (backends.backend_install_timeout_s, backends.backend_upgrade_timeout_s) == (Seconds(5), Seconds(5400))


@pytest.mark.parametrize("value", ["-5s", "0", "soon", "5 parsecs"])
@pytest.mark.parametrize(
    "name",
    [
        "CORRAL_BACKEND_INSTALL_TIMEOUT",
        "CORRAL_BACKEND_UPGRADE_TIMEOUT",
        "LOCALAI_NATS_BACKEND_INSTALL_TIMEOUT",
        "LOCALAI_NATS_BACKEND_UPGRADE_TIMEOUT",
    ],
)
def test_negative_or_unreadable_is_refused_by_name(name: str, value: str) -> None:
    with pytest.raises(BadSettings) as refused:
        read(**{name: value})
    assert refused.value.faults[0].startswith(f"{name}: ")


def test_retries_and_their_longest_pause() -> None:
    backends = read(CORRAL_RETRY_FIRST="1s", CORRAL_RETRY_CAP="8s").backends
    retry = RetryPolicy(timedelta(seconds=backends.retry_first_s), timedelta(seconds=backends.retry_cap_s))
    assert [retry.delay(failures).total_seconds() for failures in range(1, 6)] == [1, 2, 4, 8, 8]
    with pytest.raises(BadSettings, match="--retry-cap must not be shorter than --retry-first"):
        read(CORRAL_RETRY_CAP="5s")


def test_localais_gallery_is_there_from_the_start_and_can_be_left_out() -> None:
    (localai,) = galleries_of(read())
    assert (localai.name, localai.url) == ("localai", "https://index.localai.io/backends")
    assert galleries_of(read(CORRAL_GALLERIES="[]")) == ()
    (own,) = galleries_of(read(LOCALAI_BACKEND_GALLERIES='[{"name":"own","url":"https://own.test/i"}]'))
    assert own.name == "own"


def test_galleries_that_will_not_do_are_refused_by_name() -> None:
    with pytest.raises(BadSettings, match="CORRAL_GALLERIES: the gallery 'x' has no url"):
        read(CORRAL_GALLERIES='[{"name":"x"}]')


def test_nothing_is_upgraded_by_itself_unless_asked_for() -> None:
    assert read().backends.auto_upgrade is False
    assert read(LOCALAI_AUTO_UPGRADE_BACKENDS="true").backends.auto_upgrade is True
    assert read().backends.upgrade_check_interval_s == Seconds(6 * 3600)


def test_registries_without_tls() -> None:
    assert registry_settings(read(CORRAL_INSECURE_REGISTRIES="a:5000, b")).insecure == {"a:5000", "b"}
