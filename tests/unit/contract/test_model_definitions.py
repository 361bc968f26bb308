"""A model's definition: what is read of it, what is refused, and what its revision is of."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.contract.models import check_model_name, deleted_revision, read_definition, revision_of
from corral.kit.errors import Invalid

FULL: dict[str, Any] = {
    "name": "org/model",
    "backend": "llama-cpp",
    "parameters": {"model": "m.gguf"},
    "context_size": 4096,
    "parallel": 4,
    "memory": "6GiB",
    "tensor_parallel_size": 2,
    "embeddings": True,
    "concurrency_groups": ["a", "b"],
    "pinned": True,
    "idle_unload": "15m",
    "load_wait": 30,
    "while_loading": {"use": "other"},
    "download_files": [{"filename": "m.gguf", "uri": "https://x/y", "sha256": "SHA256:" + "A" * 64, "size": 9}],
    "anything": {"an": ["engine", "knows"]},
}


def test_what_is_read() -> None:
    read = read_definition(FULL)
    assert (read.name, read.backend, read.weights, read.context_size, read.parallel) == (
        "org/model",
        "llama-cpp",
        "m.gguf",
        4096,
        4,
    )
    assert (read.memory_bytes, read.tensor_parallel, read.embeddings, read.pinned) == (6 << 30, 2, True, True)
    assert (read.idle_unload_s, read.load_wait_s, read.while_loading) == (900.0, 30.0, (False, "other"))
    assert [(file.path, file.uri, file.sha256, file.size_bytes) for file in read.files] == [
        ("m.gguf", "https://x/y", "a" * 64, 9)
    ]
    assert read.whole == FULL


@pytest.mark.parametrize(
    ("whole", "name", "backend"),
    [
        ({"parameters": {"model": "m.bin"}}, "m.bin", ""),  # the weights name it
        ({"name": "a", "parameters": {"model": "M.GGUF"}}, "a", "llama-cpp"),
        ({"name": "a", "download_files": [{"filename": "x.gguf", "uri": "u"}]}, "a", "llama-cpp"),
        ({"name": "a", "backend": "vllm", "parameters": {"model": "m.gguf"}}, "a", "vllm"),
        ({"name": "a", "alias": "b"}, "a", ""),
    ],
)
def test_name_and_backend_of_a_definition_that_says_little(whole: dict[str, Any], name: str, backend: str) -> None:
    read = read_definition(whole)
    assert (read.name, read.backend) == (name, backend)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"name": 7}, "name is a text"),
        ({"name": "../x"}, "cannot be a model's name"),
        ({"name": "/x"}, "cannot be a model's name"),
        ({"name": "a*"}, "cannot be a model's name"),
        ({"name": "available"}, "cannot be a model's name: /api/models/available"),
        ({"name": ".blobs/x"}, "hidden in folders of models"),
        ({"name": "-rf"}, "begins with a dash"),
        ({"name": "a//b"}, "between two words"),
        ({"name": "a/"}, "between two words"),
        ({"name": "a/./b"}, "between two words"),
        ({"name": "a%2fb"}, "URLs read otherwise"),
        ({"name": "a\\b"}, "URLs read otherwise"),
        ({"name": "a\nb"}, "cannot be printed"),
        ({"parameters": {"model": "-x.gguf"}, "name": None}, "begins with a dash"),
        ({"name": "org/model-1.5:q4_k@main"}, None),
        ({"name": "x" * 201}, "at most 200"),
        ({"backend": "a b"}, "letters, digits"),
        ({"alias": "b", "backend": "x"}, "neither backend nor"),
        ({"parameters": []}, None),  # an empty one says nothing
        ({"parameters": ["x"]}, "parameters is a mapping"),
        ({"parameters": {"model": "../x"}}, "leads out"),
        ({"mmproj": "/etc/passwd"}, "leads out"),
        ({"context_size": -2}, "whole number"),
        ({"context_size": True}, "whole number"),
        ({"context_size": -1}, None),
        ({"embeddings": "sometimes"}, "true or false"),
        ({"memory": "80%"}, "a size"),
        ({"memory": "much"}, "a size"),
        ({"idle_unload": "soon"}, "span of time"),
        ({"while_loading": "later"}, "while_loading is"),
        ({"while_loading": {"use": "a"}}, "while_loading is"),
        ({"concurrency_groups": "a"}, "list of texts"),
        ({"limits": 3}, "limits is a mapping"),
        ({"limits": {"max_concurrent": "3"}}, "limits.max_concurrent is a whole number"),
        ({"download_files": {}}, None),
        ({"download_files": [{"filename": "../x", "uri": "u"}]}, "does not stay inside"),
        ({"download_files": [{"filename": "x"}]}, "has no uri"),
        ({"download_files": [{"filename": "x", "uri": "u", "sha256": "12"}]}, "64 hexadecimal"),
        ({"download_files": [{"filename": "x", "uri": "u"}, {"filename": "x", "uri": "v"}]}, "same filename"),
    ],
)
def test_what_cannot_be_meant(more: dict[str, Any], words: str | None) -> None:
    whole = {"name": "a", **more}
    if words is None:
        read_definition(whole)
        return
    with pytest.raises(Invalid, match=words):
        read_definition(whole)


def test_a_revision_is_of_the_meaning() -> None:
    base: dict[str, Any] = {"name": "a", "backend": "vllm", "parameters": {"model": "m", "temperature": 0.5}}
    same: list[dict[str, Any]] = [
        {"parameters": {"temperature": 0.5, "model": "m"}, "backend": "vllm", "name": "another"},
        {**base, "description": "words", "tags": ["x"], "pinned": True, "idle_unload": "1m", "limits": {"a": 1}},
        {**base, "mmproj": "", "options": [], "function": {}, "grammar": None},
    ]
    other = [{**base, "backend": "x"}, {**base, "parameters": {"model": "m"}}, {**base, "new_word": 1}]
    assert {revision_of(each) for each in same} == {revision_of(base)}
    assert len({revision_of(each) for each in (base, *other)}) == 4
    assert len(revision_of(base)) == 64


values = st.recursive(
    st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=8), values, max_size=6), st.integers())
def test_the_order_of_keys_is_no_meaning(whole: dict[str, Any], seed: int) -> None:
    def shuffled(value: Any) -> Any:
        if isinstance(value, dict):
            keys = list(value)
            random.Random(seed).shuffle(keys)
            return {key: shuffled(value[key]) for key in keys}
        return [shuffled(item) for item in value] if isinstance(value, list) else value

    assert revision_of(shuffled(whole)) == revision_of(whole)


def test_the_tombstone_of_the_contract() -> None:
    assert deleted_revision("mine") == "24312a590ff13f816cf668ba5623ba24432e6b8170f1f8f288abb7faafc32856"


def test_names_with_slashes_are_names() -> None:
    assert check_model_name("org/model:7b@q4") == "org/model:7b@q4"
