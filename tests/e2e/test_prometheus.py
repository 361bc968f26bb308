"""Prometheus of Debian with our configuration against a real fleet: it scrapes controller and gateway with a viewer's
key, every rule loads, and every panel of the dashboard has data after some requests."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.fleet import PATIENT, Fleet, http
from tests.support.grown_fleet import grown_fleet
from tests.support.processes import Process, clean_env, free_port
from tests.support.scripts import ROOT
from tests.support.waiting import wait_for

DEPLOY = ROOT / "deploy"
RULES = DEPLOY / "prometheus" / "corral-rules.yml"
DASHBOARD = DEPLOY / "grafana" / "corral.json"
DEVICE = {
    "index": 0,
    "vendor": "nvidia",
    "name": "NVIDIA H200",
    "total_bytes": 1000,
    "free_bytes": 400,
    "temperature_c": 55,
    "utilisation": 0.5,
    "power_w": 320,
}


@pytest.fixture(scope="module")
def promtool() -> str:
    if shutil.which("promtool") is None:
        subprocess.run([ROOT / "scripts" / "_debian", "prometheus"], check=False)
    found = shutil.which("promtool")
    if found is None or shutil.which("prometheus") is None:
        pytest.skip("Debian's package prometheus is not installed")
    return found


def check(*words: str | Path) -> None:
    ran = subprocess.run(list(words), capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_the_rules_load_and_their_tests_pass(promtool: str) -> None:
    check(promtool, "check", "rules", RULES)
    check(promtool, "test", "rules", RULES.with_name("corral-rules-test.yml"))
    check(promtool, "check", "config", "--syntax-only", RULES.with_name("prometheus.yml"))
    alerts = set(re.findall(r"alert: (\w+)", RULES.read_text()))
    tested = set(re.findall(r'alertname="(\w+)"', RULES.with_name("corral-rules-test.yml").read_text()))
    assert tested == alerts, "every alert has a case in which it fires"


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with grown_fleet(tmp_path_factory.mktemp("watched"), env=PATIENT) as fleet:
        definition = {"name": "smol", "backend": "mock", "parallel": 1}
        assert fleet.api("POST", "/api/models", {"definition": definition}).status == 201
        yield fleet


class Prometheus:
    """With our files, as the how-to says: another target and shorter intervals are all that differs."""

    def __init__(self, folder: Path, fleet: Fleet) -> None:
        self.port = free_port()
        made = fleet.cli("keys", "create", "prometheus", "--role", "viewer", "--json")
        assert made.returncode == 0, made.stderr
        (folder / "corral.key").write_text(json.loads(made.stdout)["secret"])
        shutil.copy(RULES, folder)
        text = (DEPLOY / "prometheus" / "prometheus.yml").read_text()
        assert "127.0.0.1:8080" in text
        text = text.replace("127.0.0.1:8080", f"127.0.0.1:{fleet.port}").replace("interval: 15s", "interval: 1s")
        (folder / "prometheus.yml").write_text(text)
        self.process = Process(
            (
                "prometheus",
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{self.port}",
            ),
            clean_env(folder),
            folder / "prometheus.log",
        )

    def get(self, path: str, **query: str) -> Any:
        answer = http("GET", f"http://127.0.0.1:{self.port}/api/v1/{path}?{urllib.parse.urlencode(query)}")
        told = answer.json()
        assert told["status"] == "success", told
        return told["data"]

    def values(self, expression: str) -> list[float]:
        """Without NaN, which a quantile of nothing is."""
        found = self.get("query", query=expression)["result"]
        return [value for each in found if (value := float(each["value"][1])) == value]


@pytest.fixture(scope="module")
def prometheus(promtool: str, fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    prometheus = Prometheus(tmp_path_factory.mktemp("prometheus"), fleet)
    try:
        wait_for(lambda: prometheus.values("count(up == 1) == 2"), "scraped fleet")
        yield prometheus
    finally:
        prometheus.process.close()


def ask(fleet: Fleet) -> None:
    words = [{"role": "user", "content": "one two three four five six"}]
    for stream in (True, False):
        answer = fleet.api("POST", "/v1/chat/completions", {"model": "smol", "messages": words, "stream": stream})
        assert answer.status == 200, answer.body


def panels() -> list[tuple[str, str]]:
    """Title and query of each, with every variable set to all."""
    dashboard = json.loads(DASHBOARD.read_text())
    found = [(panel["title"], target["expr"]) for panel in dashboard["panels"] for target in panel.get("targets", ())]
    return [
        (title, expr.replace("$__rate_interval", "1m").replace("$model", ".*").replace("$node", ".*"))
        for title, expr in found
    ]


def test_the_fleet_is_scraped_with_a_viewers_key_and_the_rules_are_loaded(prometheus: Prometheus) -> None:
    jobs = {target["labels"]["job"]: target["health"] for target in prometheus.get("targets")["activeTargets"]}
    assert jobs == {"corral-gateway": "up", "corral-controller": "up"}
    (group,) = prometheus.get("rules")["groups"]
    assert [rule["name"] for rule in group["rules"]] == re.findall(r"alert: (\w+)", RULES.read_text())
    wait_for(lambda: all(rule["health"] == "ok" for rule in prometheus.get("rules")["groups"][0]["rules"]), "rules run")


def test_every_panel_has_data_after_some_requests(fleet: Fleet, prometheus: Prometheus) -> None:
    token = fleet.token("--pre-approved")
    registered = {
        "name": "gpu-box",
        "address": "127.0.0.1:1",
        "token": token,
        "protocol": 1,
        "enrolment": "e" * 43,
        "boot_id": "b",
        "gpu_vendor": "nvidia",
        "total_vram": 1000,
        "devices": [DEVICE],
    }
    answer = fleet.http("POST", "/api/node/register", key=token, body=registered)
    assert answer.status == 201, answer.body
    deadline_at = time.monotonic() + 50
    missing: list[str] = []
    while time.monotonic() < deadline_at:
        ask(fleet)  # rates need counters that rise between two scrapes
        missing = [title for title, expression in panels() if not prometheus.values(expression)]
        if not missing:
            break
    assert missing == []
    assert prometheus.values('sum(corral_requests_total{model="smol",key="admin",status="200"})')[0] >= 2
    assert prometheus.values('corral_device_power_watts{node="gpu-box"}') == [320]
    assert prometheus.get("query", query='ALERTS{alertstate="firing"}')["result"] == []
