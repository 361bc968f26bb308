"""Which GGUF files of a repository belong together, and how they are quantised."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.controller.install.gguf_files import (
    SourceFile,
    choose_file,
    group_choices,
    is_at_most,
    plain_name,
    quant_of,
    rank,
)
from corral.kit.errors import Invalid


def files(*paths: str) -> list[SourceFile]:
    return [SourceFile(path, f"huggingface://o/r/{path}", 100) for path in paths]


@pytest.mark.parametrize(
    ("path", "quant", "plain"),
    [
        ("Llama-3.2-1B-Instruct-Q4_K_M.gguf", "Q4_K_M", "Llama-3.2-1B-Instruct"),
        ("llama.q8_0.gguf", "Q8_0", "llama"),
        ("x-IQ3_XXS.gguf", "IQ3_XXS", "x"),
        ("x-UD-Q2_K_XL-00001-of-00002.gguf", "UD-Q2_K_XL", "x"),
        ("Q4-bot.Q8_0.gguf", "Q8_0", "Q4-bot"),
        ("gpt-oss-20b-mxfp4.gguf", "MXFP4", "gpt-oss-20b"),
        ("model-fp16.gguf", "F16", "model"),
        ("BF16/x-00001-of-00003.gguf", "BF16", "x"),
        ("Qwen3-8B.gguf", "", "Qwen3-8B"),
        ("Q8_0.gguf", "Q8_0", "Q8_0"),
    ],
)
def test_the_quantisation_stands_in_the_name(path: str, quant: str, plain: str) -> None:
    assert (quant_of(path), plain_name(path)) == (quant, plain)


def test_better_ones_come_first() -> None:
    ordered = ["F32", "F16", "Q8_0", "Q6_K", "Q5_K_M", "UD-Q4_K_XL", "Q4_K_M", "Q4_0", "Q3_K_M", "IQ2_XXS", "IQ1_S"]
    assert sorted(reversed(ordered), key=rank) == ordered
    assert not is_at_most("F16", "Q8_0")
    assert is_at_most("Q8_0", "Q8_0")
    assert is_at_most("", "Q4_K_M"), "there is nothing else to have"


def test_parts_are_one_choice_and_a_projector_belongs_to_all() -> None:
    found = group_choices(
        files("b-Q8_0-00002-of-00002.gguf", "b-Q8_0-00001-of-00002.gguf", "b-Q4_0.gguf", "README.md")
        + files("mmproj-b-f32.gguf", "mmproj-b-f16.gguf")
    )
    assert [choice.quant for choice in found] == ["Q8_0", "Q4_0"]
    assert [file.path for file in found[0].files] == ["b-Q8_0-00001-of-00002.gguf", "b-Q8_0-00002-of-00002.gguf"]
    assert [choice.projector.path for choice in found if choice.projector] == ["mmproj-b-f16.gguf"] * 2
    assert found[0].size_bytes == 300


def test_a_model_with_a_missing_part_is_left_out_or_refused() -> None:
    found = group_choices(files("b-Q8_0-00001-of-00003.gguf", "b-Q8_0-00003-of-00003.gguf", "b-Q4_0.gguf"))
    assert [choice.quant for choice in found] == ["Q4_0"]
    with pytest.raises(Invalid, match="part 2 of 3 is missing"):
        group_choices(files("b-Q8_0-00001-of-00003.gguf", "b-Q8_0-00003-of-00003.gguf"))
    with pytest.raises(Invalid, match="99999 parts are too many"):
        group_choices(files("b-00001-of-99999.gguf"))


def test_one_file_of_many_brings_its_parts_and_its_projector() -> None:
    listed = files("a.gguf", "b-00001-of-00002.gguf", "b-00002-of-00002.gguf", "mmproj.gguf")
    found = choose_file(listed, "b-00002-of-00002.gguf")
    assert found is not None
    assert [file.path for file in found.all_files] == [
        "b-00001-of-00002.gguf",
        "b-00002-of-00002.gguf",
        "mmproj.gguf",
    ]
    assert choose_file(listed, "c.gguf") is None


def test_an_unknown_size_is_no_size() -> None:
    [choice] = group_choices([SourceFile("a-00001-of-00001.gguf", "u", 0)])
    assert choice.size_bytes == 0


@given(st.lists(st.text(alphabet="Qq4K_M-.0123/of gufGUF", max_size=30).map(lambda text: text + ".gguf"), max_size=8))
def test_no_names_do_harm(paths: list[str]) -> None:
    try:
        found = group_choices(files(*paths))
    except Invalid:
        return
    assert all(choice.files for choice in found)
    assert all(plain_name(path) is not None and rank(quant_of(path)) for path in paths)
