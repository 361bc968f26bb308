"""Derives the definition of a model from its files. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from corral.contract.gguf import GgufHeader
from corral.contract.models import LONGEST_NAME, check_model_name
from corral.controller.install.gguf_files import QuantChoice, SourceFile
from corral.kit.errors import Invalid

LLAMA_CPP = "llama-cpp"
# Engines for repositories of safetensors, the best first.
FOLDER_BACKENDS = ("vllm", "mlx-lm")
# A process keeps the context of every slot in memory: more than this is for those who ask for it.
MAX_CONTEXT = 32_768
MIN_CONTEXT = 4_096
_RANK_POOLING = 4  # llama.cpp's number
# They have no decoder: nothing but vectors and ranks can come out of them.
_ENCODERS = frozenset(
    {
        *("bert", "nomic-bert", "nomic-bert-moe", "neo-bert", "modern-bert", "eurobert", "jina-bert-v2"),
        *("jina-bert-v3", "gemma-embedding", "t5encoder"),
    }
)
# Other formats of the same weights, and what no engine reads.
IGNORED = ("*.bin", "*.pt", "*.pth", "*.onnx", "onnx/*", "*.gguf", "*.h5", "*.msgpack", "original/*", "*.md", "*.png")


def is_embedder(header: GgufHeader) -> bool:
    return not is_reranker(header) and (header.architecture in _ENCODERS or header.number("pooling_type") > 0)


def is_reranker(header: GgufHeader) -> bool:
    """By its pooling; converters of earlier years wrote none, and the name is all there is."""
    named = header.architecture in _ENCODERS and "rerank" in header.name.lower()
    return header.number("pooling_type") == _RANK_POOLING or named


def context_sizes(header: GgufHeader | None) -> tuple[int, ...]:
    """The context sizes to try, largest first: the model's own up to `MAX_CONTEXT`, then halves of it."""
    trained = header.number("context_length") if header is not None else 0
    if not trained:
        return (MIN_CONTEXT,)
    sizes = [min(trained, MAX_CONTEXT)]
    while sizes[-1] // 2 >= MIN_CONTEXT:
        sizes.append(sizes[-1] // 2)
    return tuple(sizes)


def derive_definition(
    name: str, choice: QuantChoice, header: GgufHeader | None, *, context_size: int, urls: Sequence[str] = ()
) -> dict[str, Any]:
    """Of GGUF files. `header`: of the first file, None if nothing is known."""
    whole: dict[str, Any] = {
        "name": name,
        "backend": LLAMA_CPP,
        "context_size": context_size,
        "parameters": {"model": choice.files[0].path},
    }
    if header is not None and is_reranker(header):
        whole |= {"reranking": True, "known_usecases": ["rerank"]}
    elif header is not None and is_embedder(header):
        whole |= {"embeddings": True, "known_usecases": ["embeddings"]}
    elif header is not None and header.chat_template is False:
        whole["known_usecases"] = ["completion"]
    else:  # unknown: llama.cpp takes a template of its own where the file has none
        whole |= {"template": {"use_tokenizer_template": True}, "known_usecases": ["chat", "completion"]}
    if choice.projector is not None and not whole.keys() & {"embeddings", "reranking"}:
        whole["mmproj"] = choice.projector.path
        whole["known_usecases"] = [*whole["known_usecases"], "vision"]
    files = choice.all_files if "mmproj" in whole else choice.files
    whole["download_files"] = [_download(file) for file in files]
    if urls:
        whole["urls"] = list(urls)
    return whole


@dataclass(frozen=True)
class HubFolder:
    """A repository of a hub, for an engine that reads folders."""

    repository: str
    revision: str
    hub: str  # huggingface or modelscope
    page_url: str


def derive_folder_definition(name: str, folder: HubFolder, backend: str) -> dict[str, Any]:
    """Of a repository of safetensors."""
    repository = folder.repository
    return {
        "name": name,
        "backend": backend,
        "parameters": {"model": repository},
        "artifacts": [
            {
                "name": repository.rpartition("/")[2],
                "target": "model",
                "source": {
                    "type": folder.hub,
                    "repo": repository,
                    "revision": folder.revision,
                    "ignore_patterns": list(IGNORED),
                },
            }
        ],
        "template": {"use_tokenizer_template": True},
        "known_usecases": ["chat", "completion"],
        "urls": [folder.page_url],
    }


def derive_name(text: str) -> str:
    """A name that clients can type, from the name of a file or a repository: lower case, no spaces, no ending."""
    name = re.sub(r"[-_. ]gguf\Z", "", text.strip(), flags=re.IGNORECASE)
    name = re.sub(r"[\s*%\\/:]+", "-", name).strip("-._").lower()
    name = "".join(letter for letter in name if letter.isprintable())[:LONGEST_NAME].strip("-._")
    try:
        return check_model_name(name)
    except Invalid:
        return "model"


def wanted_context(overrides: Mapping[str, Any]) -> int:
    """The context size that the caller asks for; 0: none."""
    wanted = overrides.get("context_size")
    return wanted if isinstance(wanted, int) and not isinstance(wanted, bool) and wanted > 0 else 0


def _download(file: SourceFile) -> dict[str, Any]:
    known = {"sha256": file.sha256, "size": file.size_bytes}
    return {"filename": file.path, "uri": file.uri} | {key: value for key, value in known.items() if value}
