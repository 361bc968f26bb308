"""Where models come from, on a real fleet: the watched folder, a gallery of one's own, one file for everything."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.fleet import Fleet
from tests.support.gguf_files import LLAMA, TOKENS, gguf
from tests.support.processes import CORRAL, Process
from tests.support.waiting import wait_for

INDEX = """
- name: ours
  url: file://{folder}/base.yaml
  overrides: {{parameters: {{model: ours.gguf}}}}
  files: [{{filename: ours.gguf, uri: "file://{models}/ours.gguf"}}]
"""


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    tmp_path = tmp_path_factory.mktemp("fleet")
    galleries = tmp_path / "data" / "controller" / "galleries"
    galleries.mkdir(parents=True)
    models = tmp_path / "data" / "controller" / "models"
    models.mkdir()
    (models / "ours.gguf").write_bytes(b"GGUF" * 250_000)
    (galleries / "index.yaml").write_text(INDEX.format(folder=galleries, models=models))
    (galleries / "base.yaml").write_text("config_file: |\n  backend: mock\n  context_size: 512\n")
    named = json.dumps([{"name": "house", "url": f"file://{galleries}/index.yaml"}])
    schedule = json.dumps([{"model_name": "early", "replicas": "all"}])
    fleet = Fleet(tmp_path, "--no-worker", CORRAL_MODEL_GALLERIES=named, CORRAL_MODEL_SCHEDULING=schedule)
    try:
        yield fleet.start()
    finally:
        fleet.close()


def clients_see(fleet: Fleet) -> list[str]:
    return [each["id"] for each in fleet.api("GET", "/v1/models").json()["data"]]


def test_models_of_a_folder_a_gallery_and_a_file(fleet: Fleet) -> None:
    saved = fleet.data / "controller" / "models" / "mine.yaml"
    saved.write_text("name: org/mine\nbackend: mock\n")
    wait_for(lambda: clients_see(fleet) == ["org/mine"], "a model that was saved")
    refused = fleet.cli("models", "edit", "org/mine", "--set", "f16=true")
    assert (refused.returncode, "the file mine.yaml" in refused.stderr) == (1, True)
    saved.unlink()
    wait_for(lambda: clients_see(fleet) == [], "a model that was removed")

    made = fleet.cli("models", "install", "house@ours", "--as", "own")
    assert made.returncode == 0, made.stderr
    told = made.stdout.splitlines()
    assert (told[0], told[-1]) == ("own installed", "own: fetched to controller")
    listed = json.loads(fleet.cli("ops", "list", "--all", "--json").stdout)
    (fetch,) = [each for each in listed if each["kind"] != "upload"]
    assert (fetch["kind"], fetch["backend"], fetch["outcome"]) == ("fetch", "own", "completed")
    assert fetch["counts"] == {"success": 1}
    again = fleet.cli("models", "install", "house@ours", "--as", "own")
    assert (again.returncode, again.stdout) == (0, "own is as it was\n"), "and its files are there"
    shown = json.loads(fleet.cli("models", "show", "own", "--json").stdout)
    assert (shown["backend"], shown["context_size"], shown["source"]) == ("mock", 512, "house@ours")
    assert (shown["files"], shown["size_bytes"]) == (1, 1_000_000)
    (line,) = fleet.cli("models", "list").stdout.splitlines()[1:]
    assert "976.6 KiB" in line
    wait_for(lambda: clients_see(fleet) == ["own"], "a model out of a gallery")

    early = fleet.api("GET", "/api/nodes/scheduling/early").json()
    assert early["spread_all"] is True
    exported = fleet.cli("export").stdout
    file = fleet.root / "fleet.yaml"
    file.write_text(exported.replace("context_size: 512", "context_size: 1024"))
    applied = fleet.cli("apply", "-f", str(file))
    assert (applied.returncode, applied.stdout) == (0, "~ model own\n    context_size: 512 → 1024\n")

    near = fleet.api("POST", "/v1/chat/completions", body={"model": "oun", "messages": []})
    assert (near.status, "own" in near.json()["error"]["message"]) == (404, True)


def begin_upload(fleet: Fleet, file: Path, log: str, says: str = "") -> tuple[Process, str]:
    """A sender that has sent something and is stopped in the middle, and its operation. An upload that is continued has
    bytes from the start: what the sender `says` about it may come later."""
    sender = Process((*CORRAL, "models", "install", str(file), "--as", "sent"), fleet.env, fleet.root / log)

    def running() -> str:
        opened = fleet.api("GET", "/api/operations").json()["operations"]
        return next((each["jobID"] for each in opened if each["kind"] == "upload" and each["currentBytes"]), "")

    operation = wait_for(running, "an upload on its way")
    wait_for(lambda: says in sender.output(), f"the words {says!r}")
    sender.signal(signal.SIGSTOP)
    return sender, operation


def test_an_upload_is_cancelled_and_continued_and_outlives_a_killed_controller(fleet: Fleet) -> None:
    file = fleet.root / "Big.Q4_0.gguf"
    file.write_bytes(gguf(LLAMA | TOKENS))
    os.truncate(file, 384 << 20)
    sender, operation = begin_upload(fleet, file, "first.log")
    shown = fleet.cli("ops", "show", operation[:8]).stdout
    assert "upload Big.Q4_0.gguf" in shown
    assert "/ 384.0 MiB" in shown
    cancelled = fleet.cli("ops", "cancel", operation[:8], "--yes")
    assert cancelled.returncode == 0, cancelled.stderr
    sender.signal(signal.SIGCONT)
    assert sender.wait() == 1
    assert f"operation {operation[:8]} was cancelled; to go on after all, run the same command again" in sender.output()
    retried = fleet.refused("ops", "retry", operation[:8])
    assert "only the sender has the file" in retried
    assert f"corral models install '{file}' --as sent" in retried.replace(str(file), f"'{file}'").replace("''", "'")

    sender, operation = begin_upload(fleet, file, "second.log", says="Continuing at")
    os.kill(fleet.child_pid("controller"), signal.SIGKILL)
    wait_for(fleet.controller_ready, "another controller process")
    sender.signal(signal.SIGCONT)
    assert sender.wait(60) == 0, sender.output()
    ended = json.loads(fleet.cli("ops", "show", operation[:8], "--json").stdout)
    assert (ended["kind"], ended["outcome"], ended["counts"]) == ("upload", "completed", {"success": 1})
    assert fleet.cli("models", "delete", "sent", "--yes").returncode == 0
