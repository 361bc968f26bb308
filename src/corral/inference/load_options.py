"""Makes the options of LoadModel from a model's definition (docs/reference/wire/grpc.md#loadmodel). Pure; needs no
gRPC.

The result is `ModelOptions` as JSON, with verbatim names. `options` in the definition is LocalAI's list of `key:value`
texts; a mapping instead sets fields of LoadModel directly and wins over everything else.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from corral.contract.artifacts import artifact_weights
from corral.contract.codec import encode
from corral.contract.models import as_flag
from corral.contract.sources import is_safe_path, parse_repository
from corral.kit.errors import Invalid

CONTEXT_SIZE = 4096
BATCH = 512
MAX_BATCH = 8192
ALL_LAYERS = 99_999_999
_INT32 = 2**31

# Alias of a backend -> the Type it stands for (docs/reference/wire/grpc.md#backend-aliases).
_TYPES = {
    "huggingface-embeddings": "SentenceTransformer",
    "sentencetransformers": "SentenceTransformer",
    "mamba": "Mamba",
    "transformers-musicgen": "MusicgenForConditionalGeneration",
}
_LLAMA_CPP = ("llama", "go-llama", "ik_llama", "ik-llama")

# These backends load `Model` and ignore `ModelFile` (docs/reference/wire/grpc.md#loadmodel): `Model` must be the path
# of the weights.
_BY_NAME_ONLY = ("mlx", "rerankers", "faster-whisper", "kokoro", "moonshine", "insightface", "rfdetr")

_TEXTS = {
    "MainGPU": "main_gpu",
    "TensorSplit": "tensor_split",
    "PipelineType": "diffusers.pipeline_type",
    "SchedulerType": "diffusers.scheduler_type",
    "CLIPSubfolder": "diffusers.clip_subfolder",
    "Quantization": "quantization",
    "RopeScaling": "rope_scaling",
    "ControlNet": "diffusers.control_net",
    "Type": "type",
    "LoadFormat": "load_format",
    "CacheTypeKey": "cache_type_k",
    "CacheTypeValue": "cache_type_v",
    "DType": "dtype",
}
# Names of files or folders: an existing one becomes a path; any other name stays, perhaps a name on the hub.
_COMPANIONS = {
    "CLIPModel": "diffusers.clip_model",
    "Tokenizer": "parameters.tokenizer",
    "LoraBase": "lora_base",
    "LoraAdapter": "lora_adapter",
    "AudioPath": "tts.audio_path",
}
_PATHS = {"MMProj": "mmproj", "DraftModel": "draft_model"}  # always inside the models folder
_FLAGS = {
    "F16Memory": "f16",
    "MLock": "mmlock",
    "LowVRAM": "low_vram",
    "Embeddings": "embeddings",
    "NUMA": "numa",
    "IMG2IMG": "diffusers.img2img",
    "NoMulMatQ": "no_mulmatq",
    "TrustRemoteCode": "trust_remote_code",
    "EnforceEager": "enforce_eager",
    "NoKVOffload": "no_kv_offloading",
    "DisableLogStatus": "disable_log_stats",
    "Reranking": "reranking",
}
_WHOLE = {
    "NGQA": "ngqa",
    "CLIPSkip": "diffusers.clip_skip",
    "SwapSpace": "swap_space",
    "MaxModelLen": "max_model_len",
    "LimitImagePerPrompt": "limit_mm_per_prompt.image",
    "LimitVideoPerPrompt": "limit_mm_per_prompt.video",
    "LimitAudioPerPrompt": "limit_mm_per_prompt.audio",
}
_NUMBERS = {
    "RopeFreqBase": "parameters.rope_freq_base",
    "RopeFreqScale": "parameters.rope_freq_scale",
    "RMSNormEps": "rms_norm_eps",
    "CFGScale": "cfg_scale",
    "LoraScale": "lora_scale",
    "YarnExtFactor": "yarn_ext_factor",
    "YarnAttnFactor": "yarn_attn_factor",
    "YarnBetaFast": "yarn_beta_fast",
    "YarnBetaSlow": "yarn_beta_slow",
    "GPUMemoryUtilization": "gpu_memory_utilization",
}
_PROXY = {
    "upstream_url": str,
    "mode": str,
    "provider": str,
    "api_key_env": str,
    "api_key_file": str,
    "upstream_model": str,
    "request_timeout_seconds": int,
    "cache_prompt": bool,
}


class LoadTarget(NamedTuple):
    """The machine that loads the model."""

    folder: str  # absolute; relative names in the definition start here
    model_file: str = ""  # absolute; empty: the weights are not a local file, and the backend finds them by name
    threads: int = 4
    seed: int = 0  # for a definition without a seed
    exists: Callable[[str], bool] = lambda _path: False


def weights_of(definition: Mapping[str, Any]) -> str:
    """The name of the weights in the definition; for a repository on the hub, its name there."""
    named = _DefinitionReader(definition).text("parameters.model") or _DefinitionReader(definition).text("model")
    repository = parse_repository(named)
    return repository.id if repository is not None else named or artifact_weights(definition)


def is_llama_cpp(backend: str) -> bool:
    """Whether the name is one of llama.cpp's, including builds for one kind of machine (`cuda12-llama-cpp`)."""
    return "llama-cpp" in backend.lower() or backend.lower() in _LLAMA_CPP


def load_options(definition: Mapping[str, Any], model: str, backend: str, target: LoadTarget) -> dict[str, Any]:
    """Raises Invalid for an invalid value, with its key. Zero values are left out."""
    reader = _DefinitionReader(definition)
    name = (reader.text("backend") or backend).lower()
    fields: dict[str, Any] = {
        "Model": _model(definition, model, name, target),
        "ModelFile": target.model_file,
        "ModelPath": target.folder,
        "ContextSize": _context_size(reader, name),
        "Seed": target.seed if reader.whole("parameters.seed", -1) == -1 else reader.whole("parameters.seed"),
        "MMap": reader.flag("mmap", not ("intel" in name or "sycl" in name)),
        "NGPULayers": reader.whole("gpu_layers", ALL_LAYERS),
        "Threads": reader.whole("threads") or target.threads,
        "CUDA": reader.flag("cuda") or reader.flag("diffusers.cuda"),
        "FlashAttention": reader.switch("flash_attention") or "auto",
        "TensorParallelSize": reader.whole("tensor_parallel_size") or reader.whole("tensor_parallel"),
        "LoraAdapters": [_found(adapter, target) for adapter in reader.texts("lora_adapters")],
        "LoraScales": reader.numbers("lora_scales"),
        "Options": _options(reader, name),
        "Overrides": reader.texts("overrides"),
        "GrammarTriggers": _triggers(reader),
        "EnableScore": "score" in reader.texts("known_usecases"),
        "EngineArgs": encode(args).decode() if (args := reader.mapping("engine_args")) else "",
        "Proxy": _proxy(reader) if name == "cloud-proxy" else {},
    }
    fields |= {field: reader.text(key) for field, key in _TEXTS.items()}
    fields |= {field: _found(reader.text(key), target) for field, key in _COMPANIONS.items()}
    fields |= {field: _below(reader.text(key), key, target) for field, key in _PATHS.items()}
    fields |= {field: reader.flag(key) for field, key in _FLAGS.items()}
    fields |= {field: reader.whole(key) for field, key in _WHOLE.items()}
    fields |= {field: reader.number(key) for field, key in _NUMBERS.items()}
    fields["NBatch"] = reader.whole("parameters.batch") or _batch(fields)
    fields["Type"] = _TYPES.get(name) or fields["Type"]
    own = reader.get("options")
    verbatim = dict(own) if isinstance(own, Mapping) else {}
    return {field: value for field, value in fields.items() if value} | verbatim


def _model(definition: Mapping[str, Any], model: str, backend: str, target: LoadTarget) -> str:
    if target.model_file and any(word in backend for word in _BY_NAME_ONLY):
        return target.model_file
    return weights_of(definition) or model


def _context_size(reader: _DefinitionReader, backend: str) -> int:
    """The definition has the context of one request; llama.cpp needs the context of all parallel requests."""
    context = max(0, reader.whole("context_size")) or CONTEXT_SIZE
    shared = context * _slots(reader) if is_llama_cpp(backend) else context
    return shared if shared < _INT32 else context


def _slots(reader: _DefinitionReader) -> int:
    """Parallel requests, from the key `parallel`. The engine's own option (`options: ["parallel:4"]`) is left to the
    engine."""
    named = {option.partition(":")[0] for option in _listed_options(reader)}
    return 1 if named & {"parallel", "n_parallel"} else max(1, reader.whole("parallel"))


def _batch(fields: Mapping[str, Any]) -> int:
    """Texts that are embedded or ranked must fit into one batch."""
    if fields["Embeddings"] or fields["Reranking"] or fields["EnableScore"]:
        return max(BATCH, min(int(fields["ContextSize"]), MAX_BATCH))
    return BATCH


def _options(reader: _DefinitionReader, backend: str) -> list[str]:
    options = _listed_options(reader)
    if is_llama_cpp(backend) and not isinstance(reader.get("options"), Mapping):
        named = {option.partition(":")[0] for option in options}
        if (slots := _slots(reader)) > 1:
            options.append(f"parallel:{slots}")
        if "cache_reuse" not in named:
            options.append("cache_reuse:256")
    return options


def _listed_options(reader: _DefinitionReader) -> list[str]:
    return [] if isinstance(reader.get("options"), Mapping) else reader.texts("options")


def _triggers(reader: _DefinitionReader) -> list[dict[str, str]]:
    listed = reader.get("function.grammar.triggers") or []
    if not isinstance(listed, list):
        raise Invalid("function.grammar.triggers of the model's definition is not a list")
    words = [each.get("word") for each in listed if isinstance(each, Mapping)]
    return [{"word": word} for word in words if isinstance(word, str) and word]


def _proxy(reader: _DefinitionReader) -> dict[str, Any]:
    proxy = reader.mapping("proxy")
    return {key: value for key, kind in _PROXY.items() if isinstance(value := proxy.get(key), kind) and value}


def _found(named: str, target: LoadTarget) -> str:
    path = posixpath.join(target.folder, named) if named and is_safe_path(named) else ""
    return path if path and target.exists(path) else named


def _below(named: str, key: str, target: LoadTarget) -> str:
    if not named:
        return ""
    if not is_safe_path(named):
        raise Invalid(f"{key} of the model's definition leads out of the models folder: {named!r}")
    return posixpath.join(target.folder, named)


class _DefinitionReader:
    """Reads values of the definition by dotted keys, each with its expected type."""

    def __init__(self, definition: Mapping[str, Any]) -> None:
        self._definition = definition

    def get(self, key: str) -> Any:
        value: Any = self._definition
        for word in key.split("."):
            value = value.get(word) if isinstance(value, Mapping) else None
        return value

    def text(self, key: str) -> str:
        value = self.get(key)
        if value is None:
            return ""
        if isinstance(value, int) and not isinstance(value, bool):
            return str(value)  # main_gpu: 0
        return str(value) if isinstance(value, str) else self._wrong(key, "a text", value)

    def switch(self, key: str) -> str:
        """A text that YAML may have parsed as a boolean: `on`."""
        value = self.get(key)
        return ("on" if value else "off") if isinstance(value, bool) else self.text(key)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.get(key)
        if value is None:
            return default
        found = as_flag(value)
        return found if found is not None else self._wrong(key, "true or false", value)

    def whole(self, key: str, default: int = 0) -> int:
        value = self.get(key)
        if value is None:
            return default
        good = isinstance(value, int) and not isinstance(value, bool) and -_INT32 <= value < _INT32
        return int(value) if good else self._wrong(key, "a whole number", value)

    def number(self, key: str) -> float:
        value = self.get(key)
        if value is None:
            return 0.0
        good = isinstance(value, int | float) and not isinstance(value, bool)
        return float(value) if good else self._wrong(key, "a number", value)

    def texts(self, key: str) -> list[str]:
        value = self.get(key) or []
        good = isinstance(value, list) and all(isinstance(item, str) for item in value)
        return list(value) if good else self._wrong(key, "a list of texts", value)

    def numbers(self, key: str) -> list[float]:
        value = self.get(key) or []
        good = isinstance(value, list) and all(isinstance(item, int | float) for item in value)
        return [float(item) for item in value] if good else self._wrong(key, "a list of numbers", value)

    def mapping(self, key: str) -> Mapping[str, Any]:
        value = self.get(key) or {}
        return value if isinstance(value, Mapping) else self._wrong(key, "a mapping", value)

    def _wrong(self, key: str, what: str, value: object) -> Any:
        raise Invalid(f"{key} of the model's definition is not {what}: {str(value)[:100]!r}")
