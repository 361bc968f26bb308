"""`corral support-bundle` of a fleet whose secrets are known: none of them is in the archive."""

from __future__ import annotations

import json
import sqlite3
import tarfile
from contextlib import closing
from pathlib import Path

import pytest

from corral.cli.backup.parts import secret_files
from corral.cli.common.data_folder import DataFolder
from tests.support.fleet import Fleet
from tests.support.grown_fleet import grown_fleet

pytestmark = pytest.mark.timeout(180)
ENV = {
    "CORRAL_COMPAT_LOCALAI": "true",
    "CORRAL_REGISTRATION_TOKEN": "open-sesame-42",
    "CORRAL_HF_TOKEN": "hf_ABCDEFGHIJKLMNOPQRSTUVWXYZ",
}
LOGIN = "hunter22hunter"


def secrets_of(fleet: Fleet) -> set[str]:
    """Everything that opens something, line by line."""
    found = {line for name in ("CORRAL_REGISTRATION_TOKEN", "CORRAL_HF_TOKEN") if (line := ENV[name])} | {LOGIN}
    folder = DataFolder(fleet.data)
    for path in secret_files(folder):
        if path.suffix == ".key" or path.suffix == ".seed":
            found |= {line for line in path.read_text().splitlines() if not line.startswith("-----")}
    for worker in (folder.worker, fleet.root / "worker-barn"):
        identity = json.loads((worker / "identity.json").read_text())
        found |= {identity["node_token"], identity["enrolment"]}
    with closing(sqlite3.connect(folder.database)) as database:
        found |= {value for (value,) in database.execute("SELECT value FROM cluster_secrets")}
    found.add(str(json.loads(fleet.cli("keys", "create", "notebook", "--json").stdout)["secret"]))
    found.add(fleet.token())
    assert len(found) > 12
    assert min(map(len, found)) > 5
    return found


def unpack(file: Path) -> dict[str, str]:
    with tarfile.open(file) as tar:
        opened = ((entry.name, tar.extractfile(entry)) for entry in tar)
        return {name.removeprefix("corral-support/"): part.read().decode() for name, part in opened if part}


def test_a_bundle_of_a_running_fleet_and_of_a_stopped_one_has_no_secret(tmp_path: Path) -> None:
    with grown_fleet(tmp_path, "barn", options=("--lan", "--show-key"), env=ENV) as fleet:
        uri = f"https://anna:{LOGIN}@127.0.0.1:9/x.gguf"
        definition = {"name": "guarded", "backend": "mock", "download_files": [{"filename": "x.gguf", "uri": uri}]}
        assert fleet.api("POST", "/api/models", {"definition": definition}).status == 201
        secrets = secrets_of(fleet)
        with (fleet.data / "logs" / "worker.log").open("a") as log:  # what another program may write there
            log.write("\n".join(sorted(secrets - {LOGIN})) + f"\nGET {uri}\n")
        file = tmp_path / "bundle.tar.gz"
        made = fleet.cli("support-bundle", str(file), "--json")
        assert made.returncode == 0, made.stderr
        assert file.stat().st_mode & 0o777 == 0o600
        parts = unpack(file)
        assert sorted(json.loads(made.stdout)["contents"]) == sorted(parts)
        assert {"about.json", "settings.json", "doctor.json", "logs/controller.log", "logs/up.log"} <= parts.keys()
        assert {node["name"] for node in json.loads(parts["fleet/nodes.json"])} == fleet.nodes().keys()
        assert json.loads(parts["fleet/models.json"])[0]["id"] == "guarded"
        controller = json.loads(parts["settings.json"])["controller"]
        assert controller["source"] == "running process"
        assert controller["settings"]["stale_after_s"] == "4s"
        assert controller["settings"]["registration_token"] == "set"
        assert all("level" in finding for finding in json.loads(parts["doctor.json"]))
        found = {(name, secret) for name, text in parts.items() for secret in secrets if secret in text}
        assert not found

        assert "exists: give another name, or --overwrite" in fleet.refused("support-bundle", str(file))
        assert fleet.up is not None
        assert fleet.up.stop() == 0
        words = ("--data", str(fleet.data), "--overwrite")
        made = fleet.cli("support-bundle", str(file), *words)
        assert made.returncode == 0, made.stderr
        parts = unpack(file)
        assert "fleet-error.txt" in parts, "what could not be collected says why"
        assert json.loads(parts["settings.json"])["controller"]["source"] == "this command"
        found = {(name, secret) for name, text in parts.items() for secret in secrets if secret in text}
        assert not found
