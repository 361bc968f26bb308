"""Repositories of the hub in a model's definition: the contract's artifacts, and URIs that name all of one."""

from __future__ import annotations

from typing import Any

import pytest

from corral.contract.artifacts import HubSnapshot
from corral.contract.models import read_definition
from corral.contract.sources import parse_repository
from corral.controller.files.required_files import required_files, required_snapshots
from corral.controller.files.snapshots import is_chosen, uri_of
from corral.inference.load_options import weights_of
from corral.kit.errors import Invalid


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("huggingface://org/name", ("org/name", "", False)),
        ("modelscope://org/name@v1", ("org/name", "v1", True)),
        ("modelscope://org/name/file.gguf", None),
        ("hf://org/name/", ("org/name", "", False)),
        ("hf.co/org/name@v1.0", ("org/name", "v1.0", False)),
        ("huggingface://org/name@abc", ("org/name", "abc", False)),
        ("huggingface://org/name/file.gguf", None),
        ("huggingface://org/name@v1/file.gguf", None),
        ("huggingface://org", None),
        ("https://huggingface.test/org/name", None),
        ("org/name", None),
    ],
)
def test_which_uris_mean_all_of_a_repository(text: str, found: tuple[str, str, bool] | None) -> None:
    assert parse_repository(text) == found


def definition(**words: Any) -> Any:
    return read_definition({"name": "m", "backend": "vllm"} | words)


def artifact(repo: str = "org/name", /, name: str = "", **source: Any) -> dict[str, Any]:
    return {"name": name, "source": {"type": "huggingface", "repo": repo} | source}


@pytest.mark.parametrize(
    ("words", "folders", "weights"),
    [
        ({"parameters": {"model": "huggingface://org/name@v1"}}, {"org/name": "v1"}, "org/name"),
        ({"artifacts": [artifact()]}, {"org/name": "main"}, "org/name"),
        ({"artifacts": [artifact(revision="v2")], "parameters": {"model": "mine"}}, {"mine": "v2"}, "mine"),
        (
            {"artifacts": [artifact() | {"resolved": {"revision": "c" * 40, "primary_file": "a.gguf"}}]},
            {"org/name": "c" * 40},
            "org/name/a.gguf",
        ),
        (
            {"artifacts": [artifact()], "parameters": {"model": "a.gguf"}},
            {"org/name": "main"},
            "a.gguf",
        ),
        (
            {"artifacts": [artifact(), artifact("org/draft", name="draft")]},
            {"org/name": "main", "draft": "main"},
            "org/name",
        ),
    ],
)
def test_where_their_files_lie_and_what_the_weights_are(
    words: dict[str, Any], folders: dict[str, str], weights: str
) -> None:
    read = definition(**words)
    assert {each.folder: each.revision for each in read.snapshots} == folders
    assert weights_of(read.whole) == weights
    assert required_files(read) == ()


@pytest.mark.parametrize(
    ("artifacts", "why"),
    [
        ({"source": {}}, "artifacts is a list"),
        (["org/name"], "entry 1: a mapping"),
        ([artifact() | {"source": "org/name"}], "source is a mapping"),
        ([{"source": {"type": "git", "repo": "org/name"}}], "'git' is not known"),
        ([artifact("name")], "write owner/name"),
        ([artifact("../x")], "write owner/name"),
        ([artifact("a/../b")], "write owner/name"),
        ([artifact() | {"target": "both"}], "model or companion"),
        ([artifact(allow_patterns="*.json")], "list of patterns"),
        ([artifact(), artifact()], "same folder"),
        ([artifact(), artifact("org/b", name="../../etc")], "stay inside"),
    ],
)
def test_what_cannot_be_meant(artifacts: Any, why: str) -> None:
    with pytest.raises(Invalid, match=why):
        definition(artifacts=artifacts)


@pytest.mark.parametrize(
    ("backend", "weights", "inferred"),
    [
        ("vllm", "org/name", True),
        ("cuda12-vllm", "org/name", True),
        ("mlx-lm", "org/name", True),
        ("llama-cpp", "org/name", False),
        ("vllm", "name", False),
        ("vllm", "a/b/c", False),
    ],
)
def test_a_bare_name_stands_for_a_repository_where_the_engine_reads_folders(
    backend: str, weights: str, inferred: bool
) -> None:
    read = definition(backend=backend, parameters={"model": weights})
    assert required_snapshots(read) == ((HubSnapshot(weights, weights),) if inferred else ())


@pytest.mark.parametrize(
    ("path", "allow", "ignore", "chosen"),
    [
        ("a/b.json", (), (), True),
        ("a/b.json", ("*.json",), (), True),
        ("a/b.json", ("a/",), (), True),
        ("a/b.json", ("b/",), (), False),
        ("a/b.json", ("*.json",), ("a/*",), False),
        ("a/B.json", ("*b.json",), (), False),
    ],
)
def test_patterns(path: str, allow: tuple[str, ...], ignore: tuple[str, ...], chosen: bool) -> None:
    assert is_chosen(path, allow, ignore) is chosen


def test_other_patterns_are_another_source() -> None:
    one, two = HubSnapshot("f", "o/n", "main", ("a,b",)), HubSnapshot("f", "o/n", "main", ("a", "b"))
    assert uri_of(one) == "huggingface://o/n@main?allow=a%2Cb"
    assert uri_of(two) == "huggingface://o/n@main?allow=a&allow=b"
