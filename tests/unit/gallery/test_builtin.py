"""The gallery that comes with Corral (docs/explanation/design.md#built-in-parts)."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from corral.contract.manifest import Continues, Needs, Placeholders, check_manifest, fill_command
from corral.gallery.backends.builtin import backends_folder, read_built_in
from corral.gallery.backends.catalogue import BackendCatalogue
from corral.gallery.backends.entries import BackendEntry
from corral.gallery.backends.variants import ChosenVariant, NoVariant, choose_variant

BACKENDS = Path(__file__).parents[3] / "backends"


@pytest.fixture(scope="module")
def catalogue() -> BackendCatalogue:
    index = read_built_in()
    assert not index.problems
    return BackendCatalogue([index])


def entry(catalogue: BackendCatalogue, name: str) -> BackendEntry:
    found = catalogue.find(name)
    assert isinstance(found, BackendEntry)
    return found


@pytest.mark.parametrize(
    ("name", "capability", "platform", "build"),
    [
        ("llama-cpp", "default", "linux/amd64", "llama-cpp-pypi"),
        ("llama-cpp", "default", "linux/arm64", "llama-cpp-pypi"),
        ("llama-cpp", "nvidia-cuda-12", "linux/amd64", "llama-cpp-pypi"),  # as long as LocalAI's gallery is not there
        ("vllm", "nvidia-cuda-13", "linux/amd64", "vllm-cuda-pypi"),
        ("vllm", "nvidia-l4t-cuda-13", "linux/arm64", "vllm-cuda-pypi"),
        ("mlx-lm", "metal", "darwin/arm64", "mlx-lm-metal-pypi"),
        ("mock", "default", "linux/amd64", "mock"),
        ("mock-grpc", "amd", "linux/arm64", "mock-grpc"),
    ],
)
def test_which_build_a_machine_gets(
    catalogue: BackendCatalogue, name: str, capability: str, platform: str, build: str
) -> None:
    choice = choose_variant(entry(catalogue, name), catalogue, capability=capability, platform=platform, platforms={})
    assert isinstance(choice, ChosenVariant)
    assert choice.entry.name == build


@pytest.mark.parametrize(
    ("name", "capability", "platform"),
    [
        ("vllm", "default", "linux/amd64"),
        ("mlx-lm", "default", "linux/amd64"),
        ("mlx-lm", "darwin-x86", "darwin/amd64"),
    ],
)
def test_who_gets_none(catalogue: BackendCatalogue, name: str, capability: str, platform: str) -> None:
    choice = choose_variant(entry(catalogue, name), catalogue, capability=capability, platform=platform, platforms={})
    assert isinstance(choice, NoVariant)


def test_every_gpu_of_the_contract_has_localais_build(catalogue: BackendCatalogue) -> None:
    mapped = entry(catalogue, "llama-cpp").capabilities
    for key in (
        "nvidia-cuda-12",
        "nvidia-cuda-13",
        "nvidia-l4t-cuda-12",
        "nvidia-l4t-cuda-13",
        "amd",
        "intel",
        "metal",
    ):
        assert mapped[key].startswith("localai@")


def test_manifests_can_be_run(catalogue: BackendCatalogue) -> None:
    here = Placeholders(
        host="127.0.0.1", port=20001, model_name="m", model_file="/d/m.gguf", model_dir="/d", slots=1, device_count=1
    )
    for each in catalogue.entries:
        if each.manifest is not None:
            check_manifest(each.manifest)
            words = fill_command(each.manifest.command, here)
            assert any("20001" in word for word in words)


def test_our_backends_come_whole(catalogue: BackendCatalogue) -> None:
    mock = {file.path: file for file in entry(catalogue, "mock").files}
    assert {"mock.py", "run.sh", "VERSION"} <= set(mock)
    assert mock["run.sh"].executable
    assert not mock["mock.py"].executable
    assert not any("__pycache__" in path for path in mock)
    assert mock["mock.py"].text == (BACKENDS / "mock" / "mock.py").read_text()
    serve = entry(catalogue, "llama-cpp-pypi").files[0]
    assert (serve.path, serve.text) == ("serve.py", (BACKENDS / "llama_cpp" / "serve.py").read_text())


def test_the_llama_cpp_wheel_declares_the_library_it_does_not_bring(catalogue: BackendCatalogue) -> None:
    manifest = entry(catalogue, "llama-cpp-pypi").manifest
    assert manifest is not None
    assert manifest.needs == Needs(("libgomp.so.1",), ("libgomp1",))


def test_who_continues_a_text_that_another_process_began(catalogue: BackendCatalogue) -> None:
    declared = {
        entry.name: entry.manifest.continues
        for entry in catalogue.entries
        if entry.manifest is not None and entry.manifest.continues is not None
    }
    assert declared == {
        "llama-cpp-pypi": Continues("prefill", "prompt"),
        "vllm-cuda-pypi": Continues("continue_final_message", "prompt"),
        "mock": Continues("prefill", "prompt"),
    }


def test_the_mock_speaks_both_protocols(catalogue: BackendCatalogue) -> None:
    manifest = entry(catalogue, "mock").manifest
    assert manifest is not None
    assert manifest.protocol == "openai"
    assert entry(catalogue, "mock-grpc").manifest is None
    assert entry(catalogue, "mock-grpc").files == entry(catalogue, "mock").files


def test_backends_are_found_in_a_checkout() -> None:
    assert Path(str(backends_folder())) == BACKENDS


@pytest.fixture(scope="module")
def serve() -> ModuleType:
    spec = importlib.util.spec_from_file_location("llama_cpp_serve", BACKENDS / "llama_cpp" / "serve.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def params() -> SimpleNamespace:
    return SimpleNamespace(model=SimpleNamespace(path=""), mmproj=SimpleNamespace(path=""), cpuparams=SimpleNamespace())


def arguments_of(serve: ModuleType, catalogue: BackendCatalogue, here: Placeholders) -> argparse.Namespace:
    manifest = entry(catalogue, "llama-cpp-pypi").manifest
    assert manifest is not None
    words = fill_command(manifest.command, here)
    assert words[:2] == ("python", "serve.py")
    parsed = serve.read_arguments(words[2:])
    assert isinstance(parsed, argparse.Namespace)
    return parsed


def test_llama_cpp_understands_its_manifest(serve: ModuleType, catalogue: BackendCatalogue) -> None:
    here = Placeholders(
        host="127.0.0.1", port=20001, model_name="m", model_file="/d/m.gguf", context_size=2048, slots=4
    )
    into = params()
    serve.fill_params(into, arguments_of(serve, catalogue, here))
    assert into.model.path == "/d/m.gguf"
    assert into.model_alias == {"m"}
    assert (into.hostnames, into.port) == (["127.0.0.1"], 20001)
    # Each of four requests has the whole context; llama.cpp would share one out among them.
    assert (into.n_ctx, into.n_parallel) == (8192, 4)
    assert not into.embedding


@pytest.mark.parametrize(
    ("quota", "expected"),
    [("100000 100000", 1), ("150000 100000", 2), ("1000 100000", 1), ("max 100000", None), ("", None), ("9 0", None)],
)
def test_llama_cpp_knows_how_many_cpus_it_may_use(
    serve: ModuleType, tmp_path: Path, quota: str, expected: int | None
) -> None:
    (tmp_path / "cpu.max").write_text(quota)
    unlimited = serve.allowed_cpus(str(tmp_path / "none"))
    assert unlimited >= 1
    got = serve.allowed_cpus(str(tmp_path / "cpu.max"))
    assert got == (min(expected, unlimited) if expected is not None else unlimited)
    assert serve.fewer_cpus(64, 2) == 2
    assert serve.fewer_cpus(8, 8) == 0


def test_llama_cpp_takes_the_models_own_context_when_nobody_says(
    serve: ModuleType, catalogue: BackendCatalogue
) -> None:
    here = Placeholders(host="127.0.0.1", port=20001, model_file="/d/m.gguf", slots=1)
    into = params()
    serve.fill_params(into, arguments_of(serve, catalogue, here))
    assert into.n_ctx == 0
    assert into.model_alias == {"m.gguf"}


@pytest.mark.parametrize(
    ("head", "words", "pooling"),
    [
        (b"GGUF bert.pooling_type", (), None),
        (b"GGUF llama.context_length", (), 1),
        (b"GGUF llama.context_length", ("--pooling", "last"), 3),
    ],
)
def test_llama_cpp_embeds_with_the_models_own_pooling_or_the_mean(
    serve: ModuleType, tmp_path: Path, head: bytes, words: tuple[str, ...], pooling: int | None
) -> None:
    (tmp_path / "m.gguf").write_bytes(head)
    base = ("--port", "1", "--model", str(tmp_path / "m.gguf"), "--mode", "embeddings")
    into = params()
    into.pooling_type = -1
    serve.fill_params(into, serve.read_arguments((*base, *words)))
    assert into.pooling_type == (-1 if pooling is None else pooling)


@pytest.mark.parametrize("words", [[], ["--port", "1"], ["--port", "70000", "--model", "m"], ["--port", "x"]])
def test_llama_cpp_refuses_what_it_does_not_understand(
    serve: ModuleType, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        serve.read_arguments(words)
    assert left.value.code == 2
    assert "usage: llama-cpp" in capsys.readouterr().err


def test_llama_cpp_without_its_model(serve: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert serve.main(["--port", "1", "--model", "/nonexistent.gguf"]) == 2
    assert capsys.readouterr().err == "there is no file /nonexistent.gguf\n"
    assert "xllamacpp" not in sys.modules
