"""Settings of the worker: what is read from where, and what is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from corral.kit.settings import BadSettings, describe, read_settings, shown, value_of
from corral.worker.settings import WorkerSettings

PIN = "sha256:" + "ab" * 32


def read(env: Mapping[str, str], flags: Mapping[str, Any] | None = None) -> WorkerSettings:
    return read_settings(WorkerSettings, flags=flags or {}, env=env)


def test_every_setting_has_a_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # root's own would lead elsewhere (tests/unit/kit/test_process.py)
    settings = read({})
    assert settings.heartbeat.heartbeat_interval_s == 10.0
    tries = settings.registration
    assert [tries.retry_first_s, tries.retry_cap_s, tries.http_timeout_s] == [2.0, 30.0, 10.0]
    assert [settings.shutdown.drain_timeout_s, settings.shutdown.leave_timeout_s] == [30.0, 90.0]
    assert settings.node.data == tmp_path / ".local/share/corral/worker"
    assert settings.node.models_dir == settings.node.data / "models"
    assert settings.node.backends_dir == settings.node.data / "backends"


@pytest.mark.parametrize(
    ("variable", "text", "field", "value"),
    [
        ("LOCALAI_REGISTER_TO", "http://c:8080/", "controller", "http://c:8080"),
        ("LOCALAI_REGISTRATION_TOKEN", " s3cret\n", "token", "s3cret"),
        ("LOCALAI_NODE_NAME", "w1", "name", "w1"),
        ("LOCALAI_HTTP_ADDR", "10.0.0.1:6000", "host", "10.0.0.1"),
        ("LOCALAI_HTTP_ADDR", "10.0.0.1:6000", "port", 6000),
        ("LOCALAI_HTTP_ADDR", ":6000", "host", "0.0.0.0"),
        ("LOCALAI_HTTP_ADDR", "[::]:6000", "host", "::"),
        ("LOCALAI_ADVERTISE_HTTP_ADDR", "w1:6000", "advertise", "w1:6000"),
        ("LOCALAI_ADDR", "w1:50051", "address", "w1:50051"),
        ("LOCALAI_ADVERTISE_ADDR", "w1:50051", "advertise_address", "w1:50051"),
        ("LOCALAI_SERVE_ADDR", "0.0.0.0:50051", "serve_address", "0.0.0.0:50051"),
        ("LOCALAI_NODE_LABELS", " tier = fast ,x=1", "labels", " tier = fast ,x=1"),
        ("LOCALAI_MAX_REPLICAS_PER_MODEL", "3", "max_replicas_per_model", 3),
        ("LOCALAI_VRAM_BUDGET", "80%", "vram_budget", "80%"),
        ("LOCALAI_MODELS_PATH", "/m", "models", Path("/m")),
        ("MODELS_PATH", "/m", "models", Path("/m")),
        ("LOCALAI_BACKENDS_PATH", "/b", "backends", Path("/b")),
        ("BACKENDS_PATH", "/b", "backends", Path("/b")),
        ("LOCALAI_BACKENDS_SYSTEM_PATH", "/s", "system_backends", Path("/s")),
        ("LOCALAI_HEARTBEAT_INTERVAL", "1m30s", "heartbeat_interval_s", 90),
        ("LOCALAI_NATS_URL", "nats://a:4222,nats://b:4222", "bus_urls", ("nats://a:4222", "nats://b:4222")),
        ("LOCALAI_NATS_REQUIRE_AUTH", "true", "bus_require_auth", True),
        ("LOCALAI_DISTRIBUTED_REQUIRE_AUTH", "1", "bus_require_auth", True),
        ("CORRAL_CONTROLLER", "https://c", "controller", "https://c"),
        ("CORRAL_TOKEN", "cj_x", "token", "cj_x"),
        ("CORRAL_PORT", "0", "port", 0),
        ("CORRAL_HOST", "::1", "host", "::1"),
        ("CORRAL_CA", PIN, "ca", PIN),
        ("CORRAL_HEARTBEAT_INTERVAL", "250ms", "heartbeat_interval_s", 0.25),
    ],
)
def test_environment(variable: str, text: str, field: str, value: object) -> None:
    assert value_of(read({variable: text}), field) == value


@pytest.mark.parametrize(
    ("variable", "text", "words"),
    [
        ("CORRAL_HEARTBEAT_INTERVAL", "-5s", "CORRAL_HEARTBEAT_INTERVAL: '-5s' is negative"),
        ("LOCALAI_HEARTBEAT_INTERVAL", "soon", "LOCALAI_HEARTBEAT_INTERVAL: 'soon' is not a duration"),
        ("CORRAL_HEARTBEAT_INTERVAL", "0", "CORRAL_HEARTBEAT_INTERVAL: must be more than zero"),
        ("CORRAL_CONTROLLER", "c:8080", "CORRAL_CONTROLLER: 'c:8080' is not a URL"),
        ("CORRAL_CONTROLLER", "http://u:p@c", "carries a password"),
        ("CORRAL_CONTROLLER", "http://c:99999", "is not a URL"),
        ("CORRAL_CONTROLLER", "http://c/?x=1", "has a query"),
        ("CORRAL_CA", "sha256:abc", "CORRAL_CA: the pin is not sha256:"),
        ("CORRAL_CA", "/no/such/file.pem", "there is no file '/no/such/file.pem'"),
        ("CORRAL_NAME", "x" * 256, "at most 255"),
        ("CORRAL_NAME", "a\x07b", "control characters"),
        ("CORRAL_NAME", "--all-pending", "hyphen"),
        ("CORRAL_NAME", "a/b", "slash"),
        ("CORRAL_NAME", "..", "slash"),
        ("CORRAL_PORT", "70000", "CORRAL_PORT: 70000 is not a port"),
        ("CORRAL_PORT", "many", "'many'"),
        ("CORRAL_ADVERTISE", "http://w1:1", "is not an address"),
        ("CORRAL_ADVERTISE", "w1:port", "no usable port"),
        ("CORRAL_LABELS", "tier", "is not a label"),
        ("CORRAL_MAX_REPLICAS_PER_MODEL", "0", "0 is less than 1"),
        ("CORRAL_VRAM_BUDGET", "120%", "more than all of the VRAM"),
        ("CORRAL_HTTP_HEARTBEAT_EVERY", "0", "0 is less than 1"),
        ("CORRAL_LOG_LEVEL", "loud", "'loud' is none of debug"),
        ("LOCALAI_NATS_JWT", "eyJ", "bus-jwt and bus-user-seed come together"),
        ("LOCALAI_NATS_TLS_CERT", "/no/such", "bus-cert and bus-key come together"),
        ("LOCALAI_NATS_TLS_CA", "/no/such", "bus-ca: there is no file '/no/such'"),
        ("CORRAL_UPLOAD_LIMIT", "much", "not a size"),
        ("CORRAL_UPLOAD_LIMIT", "80%", "not a size"),
        ("CORRAL_CACHE_LIMIT", "half", "not a number of bytes"),
    ],
)
def test_refused_by_name(variable: str, text: str, words: str) -> None:
    with pytest.raises(BadSettings) as caught:
        read({variable: text})
    assert words in str(caught.value)


@pytest.mark.parametrize(("text", "size"), [("50GiB", 50 << 30), ("900MB", 900_000_000), ("4096", 4096), ("0", 0)])
def test_the_limit_of_uploads(text: str, size: int) -> None:
    assert read({"CORRAL_UPLOAD_LIMIT": text}).localai.upload_limit_bytes == size


@pytest.mark.parametrize(("text", "size"), [("200GiB", 200 << 30), ("900MB", 900_000_000), ("0", 0)])
def test_the_limit_of_model_files(text: str, size: int) -> None:
    assert read({"CORRAL_CACHE_LIMIT": text}).install.cache_limit == size


def test_all_faults_are_told_at_once() -> None:
    with pytest.raises(BadSettings) as caught:
        read({"CORRAL_HEARTBEAT_INTERVAL": "never", "CORRAL_CONTROLLER": "nowhere"}, {"port": "-1", "labels": "x"})
    assert len(caught.value.faults) == 4


def test_a_pin_needs_https() -> None:
    with pytest.raises(BadSettings, match="nothing to verify"):
        read({"CORRAL_CONTROLLER": "http://c", "CORRAL_CA": PIN})


def test_nothing_secret_is_shown() -> None:
    text = repr(shown(read({"CORRAL_TOKEN": "cj_secret", "LOCALAI_NATS_URL": "nats://u:hush@b"})))
    assert "cj_secret" not in text
    assert "hush" not in text


def test_flags_of_the_join_line() -> None:
    flags = {doc.flag for doc in describe(WorkerSettings)}
    assert {"--controller", "--token", "--ca", "--data", "--name", "--advertise", "--labels"} <= flags
