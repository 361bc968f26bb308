"""A bundle of one fleet, loaded by another one that reaches no origin: its backend and its models answer there."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.backend_images import gallery_of, line_to, mock_image, openai_entry
from tests.support.fleet import PATIENT, Fleet
from tests.support.hub import FakeHub, Repository
from tests.support.image_registry import ImageRegistry, push_image, registry
from tests.support.processes import free_port

__all__ = ["registry"]

WEIGHTS = b"GGUF" + os.urandom(3_000_000)
QUESTION = [{"role": "user", "content": "hello"}]
pytestmark = pytest.mark.timeout(300)


@contextlib.contextmanager
def running_hub() -> Iterator[FakeHub]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="hub", daemon=True)
    thread.start()
    hub = FakeHub()

    def wait(work: Any) -> None:
        asyncio.run_coroutine_threadsafe(work, loop).result(timeout=30)

    wait(hub.__aenter__())
    try:
        yield hub
    finally:
        wait(hub.__aexit__())
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def answer_of(fleet: Fleet, model: str) -> str:
    body = {"model": model, "messages": QUESTION}
    answer = fleet.api("POST", "/v1/chat/completions", body)
    assert answer.status == 200, answer.body
    return str(answer.json()["choices"][0]["message"]["content"])


def make_bundle(root: Path, registry: ImageRegistry, file: Path) -> str:
    """On a fleet with a registry and a hub, which are gone afterwards. Returns the printed digest."""
    push_image(registry.url, "demo/mock", "1", mock_image("one"))
    with running_hub() as hub, line_to(registry.port) as line:
        hub.repositories["org/parts"] = Repository({"config.json": b"{}", "model.safetensors": os.urandom(20_000)})
        entry = openai_entry("farm-mock", f"oci://{line.host}/demo/mock:1")
        fleet = Fleet(root, CORRAL_HUGGINGFACE_URL=hub.url, **gallery_of(root / "galleries", entry), **PATIENT)
        models = fleet.data / "controller" / "models"
        models.mkdir(parents=True)
        (models / "ours.gguf").write_bytes(WEIGHTS)
        try:
            fleet.start()
            fleet.wait_status(fleet.own_node(), "healthy")
            for text in (
                "name: own\nbackend: farm-mock\nparameters: {model: ours.gguf}\n",
                "name: parts\nbackend: farm-mock\nparameters: {model: 'huggingface://org/parts'}\n",
            ):
                definition = root / "definition.yaml"
                definition.write_text(text)
                ran = fleet.cli("models", "install", "--file", str(definition), "--no-fetch")
                assert ran.returncode == 0, ran.stderr
            unknown = fleet.refused("bundle", "create", str(file), "--model", "nothing", "--no-corral")
            assert "this fleet has no model 'nothing'" in unknown
            ran = fleet.cli("bundle", "create", str(file), "--no-corral", "--json", timeout_s=120)
            assert ran.returncode == 0, ran.stdout + ran.stderr
            made = json.loads(ran.stdout)
            assert [(each["name"], each["machine"].split(",")[0]) for each in made["backends"]] == [
                ("farm-mock", "linux/amd64")
            ]
            assert [(each["name"], each["files"]) for each in made["models"]] == [("own", 1), ("parts", 2)]
            assert "exists already" in fleet.refused("bundle", "create", str(file))
            again = fleet.cli("bundle", "create", str(file), "--no-corral", "--json", "--force", timeout_s=120)
            assert json.loads(again.stdout)["digest"] == made["digest"], "the same content has the same digest"
            shown = fleet.cli("bundle", "show", str(file), "--verify")
            assert shown.returncode == 0, shown.stderr
            assert made["digest"] in shown.stdout
        finally:
            fleet.close()
    return str(made["digest"])


def test_a_fleet_without_origins_answers_from_a_bundle(tmp_path: Path, registry: ImageRegistry) -> None:
    file = tmp_path / "farm.bundle"
    digest = make_bundle(tmp_path / "a", registry, file)
    nowhere = f"http://127.0.0.1:{free_port()}"
    cut_off = {
        "CORRAL_HUGGINGFACE_URL": nowhere,
        "HTTP_PROXY": nowhere,
        "HTTPS_PROXY": nowhere,
        "NO_PROXY": "127.0.0.1",
    }
    (tmp_path / "b").mkdir()
    fleet = Fleet(tmp_path / "b", **PATIENT, **cut_off)
    try:
        fleet.start()
        fleet.wait_status(fleet.own_node(), "healthy")
        assert "farm-mock" in fleet.refused("backends", "install", "farm-mock")

        damaged = tmp_path / "damaged.bundle"
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        damaged.write_bytes(content)
        assert "damaged" in fleet.refused("bundle", "load", str(damaged))
        damaged.write_bytes(file.read_bytes()[:-2000])
        assert "is not complete" in fleet.refused("bundle", "load", str(damaged))
        assert json.loads(fleet.cli("bundle", "list", "--json").stdout) == []
        assert not list((fleet.data / "controller" / "blobs" / "bundles" / "sha256").iterdir()), "nothing was sent"

        ran = fleet.cli("bundle", "load", str(file), "--json", timeout_s=120)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        assert json.loads(ran.stdout)["digest"] == digest
        [upload] = json.loads(fleet.cli("ops", "list", "--all", "--json").stdout)
        assert (upload["kind"], upload["backend"], upload["outcome"]) == ("upload", file.name, "completed")
        installed = fleet.cli("backends", "install", "farm-mock", timeout_s=120)
        assert installed.returncode == 0, installed.stdout + installed.stderr
        for model, files in (("own", 1), ("parts", 2)):
            ran = fleet.cli("models", "install", model, "--json", timeout_s=60)
            assert ran.returncode == 0, ran.stdout + ran.stderr
            assert "one" in answer_of(fleet, model)
            listed = json.loads(fleet.cli("models", "files", model, "--json").stdout)
            assert len(listed["files"]) == files
        (staged,) = (fleet.data / "worker" / "models" / "own").rglob("ours.gguf")
        assert staged.read_bytes() == WEIGHTS

        short = digest.removeprefix("sha256:")[:12]
        assert fleet.cli("bundle", "rm", short, "--yes").returncode == 0
        assert json.loads(fleet.cli("bundle", "list", "--json").stdout) == []
        assert "there is no bundle" in fleet.refused("bundle", "rm", short, "--yes")
        assert "one" in answer_of(fleet, "own"), "what was installed stays"
    finally:
        fleet.close()
