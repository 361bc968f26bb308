"""What LoadModel is told of files that lie on a LocalAI worker."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from corral.contract.messages.replicas import ReplicaFile
from corral.controller.files.shared_folder import SharedFolder
from corral.controller.localai.staging import NotHere, Staged, list_shared, load_timeout_s, options_of, place_of
from corral.kit.errors import Failed

SET = "org/m/0123456789ab"
ROOT = f"/var/models/{SET}"


def staged(*paths: str) -> list[Staged]:
    return [Staged(f"{SET}/{path}", f"{ROOT}/{path}") for path in paths]


def told(definition: dict[str, Any], *paths: str) -> dict[str, Any]:
    place = place_of(definition, staged(*paths), set_depth=3)
    found: dict[str, Any] = json.loads(options_of(definition, "org/m", "llama-cpp", place))
    return found


def test_weights_and_what_lies_beside_them() -> None:
    definition = {
        "parameters": {"model": "w/m.gguf", "tokenizer": "org/a-hub-name"},
        "mmproj": "p.gguf",
        "lora_adapter": "loras/one.bin",
        "lora_base": "nowhere.bin",
    }
    found = told(definition, "w/m.gguf", "p.gguf", "loras/one.bin")
    assert found["Model"] == "w/m.gguf"  # the identity: never rewritten
    assert found["ModelFile"] == f"{ROOT}/w/m.gguf"
    assert found["ModelPath"] == ROOT
    assert found["MMProj"] == f"{ROOT}/p.gguf"
    assert found["LoraAdapter"] == f"{ROOT}/loras/one.bin"
    assert found["LoraBase"] == "nowhere.bin"
    assert found["Tokenizer"] == "org/a-hub-name", "a hub's name is not erased"


def test_a_folder_of_weights() -> None:
    found = told({"parameters": {"model": "tiny"}}, "tiny/config.json", "tiny/sub/model.safetensors")
    assert found["ModelFile"] == f"{ROOT}/tiny"
    assert found["ModelPath"] == ROOT


def test_weights_named_by_their_last_part_or_not_at_all() -> None:
    found = told({"parameters": {"model": "m.gguf"}}, "w/m.gguf")
    assert (found["ModelFile"], found["ModelPath"]) == (f"{ROOT}/w/m.gguf", f"{ROOT}/w")
    found = told({}, "m.gguf", "other.bin")
    assert (found["Model"], found["ModelFile"], found["ModelPath"]) == ("org/m", f"{ROOT}/m.gguf", ROOT)


def test_no_files_at_all() -> None:
    place = place_of({"parameters": {"model": "org/hub"}}, (), set_depth=3)
    found = json.loads(options_of({"parameters": {"model": "org/hub"}}, "m", "transformers", place))
    assert found["Model"] == "org/hub"
    assert "ModelFile" not in found
    assert "ModelPath" not in found


def test_what_lies_there_already() -> None:
    definition = {"parameters": {"model": "shared/m.gguf"}}
    place = place_of(definition, [Staged("shared/m.gguf", "/srv/models/shared/m.gguf")], set_depth=0)
    assert (place.model_file, place.folder) == ("/srv/models/shared/m.gguf", "/srv/models")


def test_a_worker_that_keeps_files_under_other_names_is_of_no_use() -> None:
    with pytest.raises(Failed, match="lead nowhere"):
        place_of({}, [Staged(f"{SET}/m.gguf", "/cache/7f3a")], set_depth=3)


def test_how_long_loading_may_take() -> None:
    assert load_timeout_s(0) == 300
    assert load_timeout_s(10 * 1024**3) == 500
    assert load_timeout_s(10**15) == 6 * 3600


def test_files_of_a_shared_folder_are_told_where_they_lie(tmp_path: Path) -> None:
    files = [ReplicaFile("w/m.gguf", "", 5), ReplicaFile("p.gguf", "", 3)]
    for file in files:
        (tmp_path / file.path).parent.mkdir(exist_ok=True)
        (tmp_path / file.path).write_bytes(b"x" * file.size_bytes)
    found = list_shared(files, SharedFolder(tmp_path).find)
    definition = {"parameters": {"model": "w/m.gguf"}, "mmproj": "p.gguf"}
    place = place_of(definition, found, set_depth=0)
    options: dict[str, Any] = json.loads(options_of(definition, "org/m", "llama-cpp", place))
    assert options["ModelFile"] == f"{tmp_path}/w/m.gguf"
    assert options["MMProj"] == f"{tmp_path}/p.gguf"
    (tmp_path / "p.gguf").unlink()
    with pytest.raises(NotHere, match=r"p\.gguf is not in the shared models folder"):
        list_shared(files, SharedFolder(tmp_path).find)
