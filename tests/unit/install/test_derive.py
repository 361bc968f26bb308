"""The definition that the files of a model result in."""

from __future__ import annotations

import io
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.contract.gguf import GgufHeader, read_header
from corral.contract.models import check_model_name, read_definition
from corral.controller.install.derive import (
    HubFolder,
    context_sizes,
    derive_definition,
    derive_folder_definition,
    derive_name,
    is_embedder,
    is_reranker,
)
from corral.controller.install.gguf_files import QuantChoice, SourceFile
from tests.support.gguf_files import LLAMA, TOKENS, gguf

WEIGHTS = SourceFile("d/x-Q4_0.gguf", "huggingface://o/r@c/d/x-Q4_0.gguf", 7, "a" * 64)
PROJECTOR = SourceFile("mmproj-x.gguf", "huggingface://o/r@c/mmproj-x.gguf", 3)


def header(architecture: str = "llama", *, template: bool = False, **more: Any) -> GgufHeader:
    values = {key.replace("llama", architecture, 1) if key.startswith("llama") else key: v for key, v in LLAMA.items()}
    values |= {"general.architecture": architecture} | TOKENS
    values |= {key.replace("__", "."): value for key, value in more.items()}
    values |= {"tokenizer.chat_template": "{{ messages }}" * 100} if template else {}
    return read_header(io.BytesIO(gguf(values)), whole=True)


def derive(found: GgufHeader | None, choice: QuantChoice | None = None) -> dict[str, Any]:
    whole = derive_definition("x", choice or QuantChoice("Q4_0", (WEIGHTS,)), found, context_size=4096)
    read_definition(whole)
    return whole


def test_a_chat_model() -> None:
    assert derive(header(template=True)) == {
        "name": "x",
        "backend": "llama-cpp",
        "context_size": 4096,
        "parameters": {"model": "d/x-Q4_0.gguf"},
        "template": {"use_tokenizer_template": True},
        "known_usecases": ["chat", "completion"],
        "download_files": [
            {"filename": "d/x-Q4_0.gguf", "uri": WEIGHTS.uri, "sha256": "a" * 64, "size": 7},
        ],
    }


def test_without_a_template_it_completes() -> None:
    found = derive(header())
    assert found["known_usecases"] == ["completion"]
    assert "template" not in found
    assert derive(None)["known_usecases"] == ["chat", "completion"], "nobody knows: the engine has templates of its own"


@pytest.mark.parametrize(
    ("architecture", "more", "kind"),
    [
        ("bert", {}, "embeddings"),
        ("nomic-bert", {"nomic-bert__pooling_type": 1}, "embeddings"),
        ("qwen3", {"qwen3__pooling_type": 3}, "embeddings"),
        ("qwen3", {"qwen3__pooling_type": 4}, "reranking"),
        ("bert", {"bert__pooling_type": 4}, "reranking"),
        ("bert", {"general__name": "BGE Reranker v2"}, "reranking"),
        ("llama", {"general__name": "a reranker of names"}, ""),
        ("llama", {"llama__pooling_type": 0}, ""),
    ],
)
def test_what_embeds_and_what_ranks_is_recognised(architecture: str, more: dict[str, Any], kind: str) -> None:
    found = header(architecture, template=True, **more)
    assert (is_embedder(found), is_reranker(found)) == (kind == "embeddings", kind == "reranking")
    whole = derive(found)
    assert {key for key in ("embeddings", "reranking") if whole.get(key)} == ({kind} if kind else set())
    assert ("template" in whole) == (not kind)


def test_a_projector_makes_it_see() -> None:
    whole = derive(header(template=True), QuantChoice("Q4_0", (WEIGHTS,), PROJECTOR))
    assert whole["mmproj"] == "mmproj-x.gguf"
    assert "vision" in whole["known_usecases"]
    assert [file["filename"] for file in whole["download_files"]] == ["d/x-Q4_0.gguf", "mmproj-x.gguf"]
    embedder = derive(header("bert"), QuantChoice("Q4_0", (WEIGHTS,), PROJECTOR))
    assert "mmproj" not in embedder
    assert len(embedder["download_files"]) == 1


@pytest.mark.parametrize(
    ("trained", "sizes"),
    [(131_072, (32_768, 16_384, 8192, 4096)), (8192, (8192, 4096)), (512, (512,)), (6000, (6000,))],
)
def test_context_sizes_to_try(trained: int, sizes: tuple[int, ...]) -> None:
    assert context_sizes(header(llama__context_length=trained)) == sizes
    assert context_sizes(None) == (4096,)


def test_a_repository_for_an_engine_that_reads_folders() -> None:
    definition = read_definition(
        derive_folder_definition("big", HubFolder("org/Big", "c0ffee", "huggingface", "https://h/org/Big"), "vllm")
    )
    [snapshot] = definition.snapshots
    assert (snapshot.repo, snapshot.revision, snapshot.folder) == ("org/Big", "c0ffee", "org/Big")
    assert "*.bin" in snapshot.ignore


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Llama-3.2-1B-Instruct-GGUF", "llama-3.2-1b-instruct"),
        ("My Model  (v2)", "my-model-(v2)"),
        ("Größe", "größe"),
        ("..", "model"),
        ("available", "model"),
        ("-x-", "x"),
        ("a*b%c\\d", "a-b-c-d"),
        ("x" * 500, "x" * 200),
    ],
)
def test_names_that_clients_can_type(text: str, name: str) -> None:
    assert derive_name(text) == name


@given(st.text(max_size=300))
def test_any_text_results_in_a_name(text: str) -> None:
    check_model_name(derive_name(text))
