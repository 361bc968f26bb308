"""Two workers and a controller that share one models folder: files are used where they lie, and nothing is written."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.fleet import PATIENT, Fleet
from tests.support.waiting import wait_for

WEIGHTS = b"GGUF" + os.urandom(3_000_000)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "shared"
    (folder / "org" / "parts").mkdir(parents=True)
    (folder / "ours.gguf").write_bytes(WEIGHTS)
    (folder / "org" / "parts" / "config.json").write_text("{}")
    (folder / "org" / "parts" / "model.safetensors").write_bytes(WEIGHTS[:1000])
    return folder


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, shared: Path) -> Iterator[Fleet]:
    """Each test leaves no model in it."""
    env = {"CORRAL_SHARED_MODELS": "true", "CORRAL_MODELS_FOLDER": str(shared)} | PATIENT
    fleet = Fleet(tmp_path_factory.mktemp("shared"), "--no-worker", **env)
    try:
        fleet.start()
        token = fleet.token("--pre-approved", "--uses", "2")
        for name in ("attic", "barn"):
            fleet.join(name, token=token, options=("--models", str(shared)))
        for name in ("attic", "barn"):
            fleet.wait_status(name, "healthy")
        yield fleet
    finally:
        fleet.close()


def contents(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Of each entry: inode, time of the last change, number of names."""
    found = {}
    for path in sorted(folder.rglob("*")):
        status = path.stat()
        found[path.relative_to(folder).as_posix()] = (status.st_ino, status.st_mtime_ns, status.st_nlink)
    return found


def install(fleet: Fleet, text: str) -> Any:
    definition = fleet.root / "definition.yaml"
    definition.write_text(text)
    return fleet.cli("models", "install", "--file", str(definition))


def answers(fleet: Fleet, model: str) -> None:
    body = {"model": model, "messages": [{"role": "user", "content": "hello"}]}
    answer = fleet.api("POST", "/v1/chat/completions", body)
    assert answer.status == 200, answer.body


def test_two_workers_use_one_folder_and_write_nothing(fleet: Fleet, shared: Path) -> None:
    before = contents(shared)
    for name, weights in (("own", "ours.gguf"), ("parts", "org/parts")):
        ran = install(fleet, f"name: {name}\nbackend: mock\nparameters: {{model: {weights}}}\n")
        assert ran.returncode == 0, ran.stderr
        assert fleet.cli("models", "scale", name, "--all").returncode == 0

        def is_ready_on_both(name: str = name) -> bool:
            rows = json.loads(fleet.cli("models", "replicas", name, "--json").stdout)
            assert sorted(row["node_name"] for row in rows if row["process_state"] == "ready") == ["attic", "barn"], (
                rows
            )
            return True

        wait_for(is_ready_on_both, "a replica on both nodes", 60)
        answers(fleet, name)
    shown = json.loads(fleet.cli("models", "files", "own", "--json").stdout)
    assert [(file["path"], file["size_bytes"]) for file in shown["files"]] == [("ours.gguf", len(WEIGHTS))]
    assert [node["state"] for node in shown["nodes"]] == ["whole", "whole"]
    staged = fleet.cli("models", "stage", "own")
    assert staged.returncode == 0, staged.stdout + staged.stderr
    assert contents(shared) == before, "the folder is as it was"
    blobs = fleet.data / "controller" / "blobs" / "sha256"
    assert not list(blobs.iterdir()), "the controller copied nothing"

    assert fleet.cli("models", "gc").returncode == 0
    for name in ("own", "parts"):
        assert fleet.cli("models", "delete", name, "--yes").returncode == 0
    wait_for(lambda: not json.loads(fleet.cli("models", "list", "--json").stdout), "no models")
    assert contents(shared) == before, "files of the user are not deleted"


def test_a_file_that_is_not_in_the_folder_is_named(fleet: Fleet, shared: Path) -> None:
    text = "name: lost\nbackend: mock\ndownload_files: [{filename: lost.gguf, uri: 'https://host.test/lost.gguf'}]\n"
    ran = install(fleet, text)
    assert ran.returncode == 1
    assert f"lost.gguf is not in the shared models folder {shared}" in ran.stdout + ran.stderr
    (shared / "lost.gguf").write_bytes(WEIGHTS[:100])
    answers(fleet, "lost")
    assert fleet.cli("models", "delete", "lost", "--yes").returncode == 0
