"""From the order for a replica to the process to start. Pure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from corral.contract.manifest import LOCALAI, Manifest
from corral.contract.messages.replicas import ReplicaFile, StartReplica
from corral.kit.errors import Invalid, NotFound
from corral.worker.agent.orders.replacement import successor
from corral.worker.agent.orders.replica_spec import spec_of
from corral.worker.installer.inventory import InstalledBackend
from corral.worker.installer.records import VersionRecord

OPENAI = Manifest(protocol="openai", command=("serve", "{port}"))


def build(folder: Path, manifest: Manifest = OPENAI) -> InstalledBackend:
    return InstalledBackend("b", folder / "v", manifest, record=VersionRecord(id="v", digest="sha256:1"))


def order(**more: Any) -> StartReplica:
    return StartReplica(
        **{"op_id": "op", "attempt": 1, "process_id": "p", "model": "m", "replica": 2, "backend": "b", **more}
    )


def test_the_process_of_an_order(tmp_path: Path) -> None:
    (tmp_path / "w.gguf").write_bytes(b"1234")
    files = (ReplicaFile("w.gguf", size_bytes=4),)
    definition = {"context_size": 512, "parallel": 4, "env": {"A": "b"}}
    spec = spec_of(order(files=files, definition=definition, revision="r1"), build(tmp_path), tmp_path)
    assert (spec.key, spec.process_id, spec.revision, spec.digest) == ("m#2", "p", "r1", "sha256:1")
    assert (spec.model_file, spec.model_dir) == (str(tmp_path / "w.gguf"), str(tmp_path))
    assert (spec.context_size, spec.slots, spec.env) == (512, 4, {"A": "b"})
    assert spec.restart.most == 4, "then whoever placed it decides again"


def test_weights_the_definition_names(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "w.gguf").write_bytes(b"1")
    spec = spec_of(order(definition={"model": "sub/w.gguf"}), build(tmp_path), tmp_path)
    assert spec.model_file == str(tmp_path / "sub" / "w.gguf")
    for elsewhere in ("org/name", "../secret", "/etc/passwd"):
        assert spec_of(order(definition={"model": elsewhere}), build(tmp_path), tmp_path).model_file == ""


def test_a_grpc_backend_is_told_what_to_load(tmp_path: Path) -> None:
    definition = {"model": "org/name", "context_size": 64, "options": {"Threads": 2, "ContextSize": 99}}
    spec = spec_of(order(definition=definition), build(tmp_path, LOCALAI), tmp_path)
    told = json.loads(spec.load)
    assert (told["Model"], told["ModelPath"], "ModelFile" in told) == ("org/name", str(tmp_path), False)
    assert (told["ContextSize"], told["Threads"]) == (99, 2)  # what it says in the backend's own words counts
    assert spec.definition == definition  # requests take their defaults from it
    assert json.loads(spec_of(order(), build(tmp_path, LOCALAI), tmp_path).load)["Model"] == "m"
    with pytest.raises(Invalid, match="overrides"):
        spec_of(order(definition={"overrides": 5}), build(tmp_path, LOCALAI), tmp_path)
    assert spec_of(order(definition={"overrides": 5}), build(tmp_path), tmp_path).load == ""


def test_weights_that_are_a_repository_of_the_hub_are_their_own_folder(tmp_path: Path) -> None:
    files = tuple(ReplicaFile(f"m/1a2b/org/name/{name}") for name in ("config.json", "model.safetensors"))
    (tmp_path / "m/1a2b/org/name").mkdir(parents=True)
    for file in files:
        (tmp_path / file.path).write_bytes(b"1")
    folder = str(tmp_path / "m/1a2b/org/name")
    for definition in (
        {"parameters": {"model": "huggingface://org/name@v1"}},
        {"parameters": {"model": "org/name"}},
        {"artifacts": [{"source": {"repo": "org/name"}}]},
    ):
        spec = spec_of(order(files=files, definition=definition), build(tmp_path), tmp_path)
        assert (spec.model_file, spec.model_dir) == (folder, folder), definition


def test_weights_among_the_files_of_an_order(tmp_path: Path) -> None:
    for name in ("m/proj.gguf", "m/sub/w.gguf", "m/hub/config.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"1")
    files = tuple(ReplicaFile(name) for name in ("m/proj.gguf", "m/sub/w.gguf", "m/hub/config.json"))

    def told(**definition: Any) -> tuple[str, str, str, str]:
        spec = spec_of(order(files=files, definition=definition), build(tmp_path, LOCALAI), tmp_path)
        load = json.loads(spec.load)
        where = (load["ModelFile"], load["ModelPath"], load.get("MMProj", ""))
        return spec.model_file, *(path.removeprefix(str(tmp_path)) for path in where)

    weights = str(tmp_path / "m" / "sub" / "w.gguf")
    named = told(parameters={"model": "sub/w.gguf"}, mmproj="proj.gguf")
    assert named == (weights, "/m/sub/w.gguf", "/m", "/m/proj.gguf")
    assert told(parameters={"model": "hub"})[1:3] == ("/m/hub", "/m")  # a folder with what it needs
    assert told(parameters={"model": "org/elsewhere"})[1:3] == ("/m/proj.gguf", "/m")


@pytest.mark.parametrize(
    ("more", "error"),
    [
        ({"protocol": "grpc"}, Invalid),
        ({"definition": {"context_size": "many"}}, Invalid),
        ({"definition": {"context_size": -2}}, Invalid),
        ({"definition": {"parallel": -1}}, Invalid),
        ({"definition": {"parallel": True}}, Invalid),
        ({"definition": {"env": ["a"]}}, Invalid),
        ({"definition": {"env": {"A": 1}}}, Invalid),
        ({"files": (ReplicaFile("../w"),)}, Invalid),
        ({"files": (ReplicaFile("/etc/passwd"),)}, Invalid),
        ({"files": (ReplicaFile("absent"),)}, NotFound),
    ],
)
def test_what_cannot_be_started(tmp_path: Path, more: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        spec_of(order(**more), build(tmp_path), tmp_path)


def test_a_link_out_of_the_models_folder_is_not_followed(tmp_path: Path) -> None:
    models, secret = tmp_path / "models", tmp_path / "secret"
    models.mkdir()
    secret.write_text("1")
    (models / "w").symlink_to(secret)
    with pytest.raises(Invalid):
        spec_of(order(files=(ReplicaFile(str(models / "w")),)), build(tmp_path), models)


def test_a_successor_is_the_same_process_of_another_build(tmp_path: Path) -> None:
    old = spec_of(order(revision="r", definition={"parallel": 3}), build(tmp_path / "1"), tmp_path)
    new = successor(old, build(tmp_path / "2", LOCALAI))
    assert (new.key, new.revision, new.slots) == (old.key, "r", 3)
    assert (new.directory, new.manifest, new.process_id) == (str(tmp_path / "2" / "v"), LOCALAI, "")
    assert json.loads(new.load)["Model"] == "m"  # this one speaks gRPC, and is told what to load
