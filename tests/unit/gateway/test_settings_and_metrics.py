"""Settings tell all their faults at once; numbers come out in the text format."""

from __future__ import annotations

from pathlib import Path

import pytest

from corral.contract.http import RelayResult, Target, UpstreamFailed
from corral.gateway.receipts.metrics import Metrics, RouteClass, render
from corral.gateway.responses import status_for
from corral.gateway.settings import GatewaySettings
from corral.gateway.view.controller_link import parse_controller
from corral.kit.histogram import Histogram
from corral.kit.settings import BadSettings, read_settings, shown


@pytest.mark.parametrize(
    ("text", "target", "base_url"),
    [
        ("unix:/run/c.sock", Target(unix_path="/run/c.sock"), "http://127.0.0.1"),
        ("unix:///run/c.sock", Target(unix_path="/run/c.sock"), "http://127.0.0.1"),
        ("http://10.0.0.5:9090", Target(host="10.0.0.5", port=9090), "http://10.0.0.5:9090"),
        ("http://c.example/", Target(host="c.example", port=80), "http://c.example:80"),
        ("https://c.example", Target(host="c.example", port=443, tls=True), "https://c.example:443"),
        ("https://[2001:db8::1]:8443", Target(host="2001:db8::1", port=8443, tls=True), "https://[2001:db8::1]:8443"),
    ],
)
def test_where_a_controller_can_be(text: str, target: Target, base_url: str) -> None:
    address = parse_controller(text)
    assert (address.target, address.base_url) == (target, base_url)


@pytest.mark.parametrize(
    "text",
    ["", "unix:", "unix:/", "c.sock", "10.0.0.5:9090", "ftp://c.example", "http://", "http://c/path", "http://u@c",
     "http://c:99999", "http://c?x=1"],
)  # fmt: skip
def test_where_a_controller_cannot_be(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_controller(text)


def test_settings_are_read_from_the_environment() -> None:
    settings = read_settings(
        GatewaySettings,
        flags={"port": 9000},
        env={
            "CORRAL_CONTROLLER": "unix:/run/c.sock",
            "CORRAL_GATEWAY_KEY": "ck_secret",
            "CORRAL_CORS_ORIGINS": "https://a.example, https://b.example",
            "CORRAL_DRAIN_TIMEOUT": "90s",
        },
    )
    assert (settings.host, settings.port, settings.drain_timeout_s) == ("127.0.0.1", 9000, 90.0)
    assert settings.cors_origins == ("https://a.example", "https://b.example")
    assert shown(settings)["gateway_key"] == "set"
    assert "ck_secret" not in str(shown(settings))


def test_all_faults_are_told_at_once() -> None:
    env = {
        "CORRAL_PORT": "70000",
        "CORRAL_CORS_ORIGINS": "a.example",
        "CORRAL_LOG_LEVEL": "loud",
        "CORRAL_VIEW_CHECK_INTERVAL": "0",
        "CORRAL_CONTROLLER": "nowhere",
    }
    with pytest.raises(BadSettings) as caught:
        read_settings(GatewaySettings, flags={}, env=env)
    assert len(caught.value.faults) == 5


def test_a_certificate_for_the_bus_needs_its_key_and_files_that_are_there(tmp_path: Path) -> None:
    there = tmp_path / "there.pem"
    there.touch()
    env = {"CORRAL_CONTROLLER": "unix:/run/c.sock", "CORRAL_BUS_CERT": str(there), "CORRAL_BUS_CA": "/nowhere.pem"}
    with pytest.raises(BadSettings) as caught:
        read_settings(GatewaySettings, flags={}, env=env)
    assert caught.value.faults == (
        "bus-ca: there is no file '/nowhere.pem'",
        "set both bus-cert and bus-key, or neither",
    )
    whole = {"CORRAL_CONTROLLER": "unix:/run/c.sock", "LOCALAI_NATS_TLS_CERT": str(there), "CORRAL_BUS_KEY": str(there)}
    settings = read_settings(GatewaySettings, flags={}, env=whole)
    assert (settings.bus_cert, settings.bus_key, settings.bus_ca) == (there, there, None)


def test_many_spans_are_counted_as_one_by_one() -> None:
    spans = [0.0, 0.001, 0.0011, 0.0025, 0.3, 59.9, 60.0, 300.0, 301.0, 0.001]
    one, many = Histogram(), Histogram()
    for seconds in spans:
        one.observe(seconds)
    many.observe_all(list(spans))
    assert many.counts == one.counts
    assert many.total_s == pytest.approx(one.total_s)


def test_numbers_come_out_as_text() -> None:
    metrics = Metrics()
    counts = metrics.routes[RouteClass.MODELS]
    for seconds in (0.0005, 0.004, 400.0):
        counts.in_flight += 1
        counts.end(200, seconds)
    counts.in_flight += 1
    metrics.view.confirmed_at = 90.0
    lines = render(metrics, now=100.0).decode().splitlines()
    for line in (
        'corral_gateway_requests_total{route="models",status="200"} 3.0',
        'corral_gateway_requests_in_flight{route="models"} 1.0',
        'corral_gateway_request_seconds_bucket{le="0.001",route="models"} 1.0',
        'corral_gateway_request_seconds_bucket{le="0.005",route="models"} 2.0',
        'corral_gateway_request_seconds_bucket{le="300.0",route="models"} 2.0',
        'corral_gateway_request_seconds_bucket{le="+Inf",route="models"} 3.0',
        'corral_gateway_request_seconds_count{route="models"} 3.0',
        "corral_gateway_view_age_seconds 10.0",
        "corral_gateway_controller_reachable 0.0",
    ):
        assert line in lines


@pytest.mark.parametrize(
    ("status", "complete", "client_gone", "counted", "observed"),
    [
        (201, True, False, 201, 1),
        (200, False, True, 499, 1),
        (0, False, True, 499, 0),
        (200, False, False, 200, 1),
    ],
)
def test_how_a_relay_ended_is_counted(
    status: int, complete: bool, client_gone: bool, counted: int, observed: int
) -> None:
    counts = Metrics().routes[RouteClass.CONTROLLER]
    assert counts.count_relayed(RelayResult(status, complete, client_gone, 0.01, 0.02, 100), 0.01) == counted
    assert sum(counts.first_byte.counts) == observed


@pytest.mark.parametrize(
    ("failure", "status"),
    [
        (UpstreamFailed("no", refused=True), 503),
        (UpstreamFailed("no", refused=True, timed_out=True), 503),
        (UpstreamFailed("no", refused=False, timed_out=True), 504),
        (UpstreamFailed("no", refused=False), 502),
    ],
)
def test_a_failure_tells_whether_something_may_have_happened(failure: UpstreamFailed, status: int) -> None:
    assert status_for(failure) == status
