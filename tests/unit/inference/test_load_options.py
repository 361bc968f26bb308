"""From a model's YAML to what LoadModel is told, in the contract's names."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from google.protobuf import json_format

from corral.contract import backend_pb2 as pb
from corral.contract.codec import encode
from corral.inference.load_options import LoadTarget, load_options
from corral.kit.errors import Invalid

PLACE = LoadTarget("/models/m", "/models/m/w.gguf", threads=6, seed=77, exists=lambda path: path.endswith("lora.bin"))


def loaded(text: str, *, model: str = "m", backend: str = "b") -> pb.ModelOptions:
    """As the backend receives it."""
    told = load_options(yaml.safe_load(text) or {}, model, backend, PLACE)
    return json_format.Parse(encode(told).decode(), pb.ModelOptions())


def test_what_is_told_of_a_model_that_says_nothing() -> None:
    told = loaded("")
    assert json_format.MessageToDict(told, preserving_proto_field_name=True) == {
        "Model": "m",
        "ModelFile": "/models/m/w.gguf",
        "ModelPath": "/models/m",
        "ContextSize": 4096,
        "Seed": 77,
        "NBatch": 512,
        "MMap": True,
        "NGPULayers": 99999999,
        "Threads": 6,
        "FlashAttention": "auto",
    }


# The contract's table, key by key.
WHOLE = """
name: chatty
backend: vllm
parameters: {model: org/repo, seed: 5, batch: 64, rope_freq_base: 1.5, rope_freq_scale: 0.5, tokenizer: org/tok}
context_size: 2048
f16: true
mmlock: true
mmap: false
low_vram: true
embeddings: true
numa: true
gpu_layers: 12
main_gpu: 0
tensor_split: "1,1"
threads: 3
rms_norm_eps: 0.25
ngqa: 8
diffusers: {pipeline_type: p, scheduler_type: s, cuda: true, img2img: true, clip_model: c, clip_subfolder: f,
  clip_skip: 2, control_net: n}
cfg_scale: 7.5
lora_base: base
lora_adapter: lora.bin
lora_adapters: [lora.bin, other]
lora_scale: 0.5
lora_scales: [1, 0.5]
no_mulmatq: true
tts: {audio_path: voice.wav}
draft_model: draft.gguf
quantization: bnb_4bit
mmproj: proj.gguf
rope_scaling: linear
yarn_ext_factor: 1.0
yarn_attn_factor: 2.0
yarn_beta_fast: 3.0
yarn_beta_slow: 4.0
type: AutoModelForCausalLM
gpu_memory_utilization: 0.5
trust_remote_code: true
enforce_eager: true
swap_space: 4
max_model_len: 1000
tensor_parallel_size: 2
flash_attention: on
no_kv_offloading: true
load_format: auto
options: ["a:b", "c:d:e"]
cache_type_k: q8_0
cache_type_v: q4_0
function: {grammar: {triggers: [{word: "<tool>"}]}}
disable_log_stats: true
dtype: float16
limit_mm_per_prompt: {image: 1, video: 2, audio: 3}
reranking: true
overrides: ["x:y"]
engine_args: {enable_prefix_caching: true}
known_usecases: [chat, score]
"""


def test_every_key_of_the_contract_has_its_field() -> None:
    told = json_format.MessageToDict(loaded(WHOLE), preserving_proto_field_name=True)
    assert told == {
        "Model": "org/repo",
        "ModelFile": "/models/m/w.gguf",
        "ModelPath": "/models/m",
        "ContextSize": 2048,
        "Seed": 5,
        "NBatch": 64,
        "F16Memory": True,
        "MLock": True,
        "LowVRAM": True,
        "Embeddings": True,
        "NUMA": True,
        "NGPULayers": 12,
        "MainGPU": "0",
        "TensorSplit": "1,1",
        "Threads": 3,
        "RopeFreqBase": 1.5,
        "RopeFreqScale": 0.5,
        "RMSNormEps": 0.25,
        "NGQA": 8,
        "PipelineType": "p",
        "SchedulerType": "s",
        "CUDA": True,
        "CFGScale": 7.5,
        "IMG2IMG": True,
        "CLIPModel": "c",
        "CLIPSubfolder": "f",
        "CLIPSkip": 2,
        "Tokenizer": "org/tok",
        "LoraBase": "base",
        "LoraAdapter": "/models/m/lora.bin",
        "NoMulMatQ": True,
        "AudioPath": "voice.wav",
        "DraftModel": "/models/m/draft.gguf",
        "Quantization": "bnb_4bit",
        "MMProj": "/models/m/proj.gguf",
        "LoraScale": 0.5,
        "RopeScaling": "linear",
        "YarnExtFactor": 1.0,
        "YarnAttnFactor": 2.0,
        "YarnBetaFast": 3.0,
        "YarnBetaSlow": 4.0,
        "ControlNet": "n",
        "Type": "AutoModelForCausalLM",
        "GPUMemoryUtilization": 0.5,
        "TrustRemoteCode": True,
        "EnforceEager": True,
        "SwapSpace": 4,
        "MaxModelLen": 1000,
        "TensorParallelSize": 2,
        "FlashAttention": "on",
        "NoKVOffload": True,
        "LoadFormat": "auto",
        "LoraAdapters": ["/models/m/lora.bin", "other"],
        "LoraScales": [1.0, 0.5],
        "Options": ["a:b", "c:d:e"],
        "CacheTypeKey": "q8_0",
        "CacheTypeValue": "q4_0",
        "GrammarTriggers": [{"word": "<tool>"}],
        "DisableLogStatus": True,
        "DType": "float16",
        "LimitImagePerPrompt": 1,
        "LimitVideoPerPrompt": 2,
        "LimitAudioPerPrompt": 3,
        "Reranking": True,
        "Overrides": ["x:y"],
        "EngineArgs": '{"enable_prefix_caching":true}',
        "EnableScore": True,
    }
    fields = {field.name for field in pb.ModelOptions.DESCRIPTOR.fields}
    assert fields - set(told) == {"VocabOnly", "MMap", "Proxy"}, "never set by core; said to be false; another backend"


@pytest.mark.parametrize(
    ("text", "field", "value"),
    [
        ("context_size: -1", "ContextSize", 4096),
        ("{embeddings: true, context_size: 2000}", "NBatch", 2000),
        ("{reranking: true, context_size: 100}", "NBatch", 512),
        ("backend: intel-sycl-f16-llama-cpp", "MMap", False),
        ("backend: sentencetransformers", "Type", "SentenceTransformer"),
        ("backend: transformers-musicgen", "Type", "MusicgenForConditionalGeneration"),
        ("{backend: llama-cpp, parallel: 4}", "Options", ["parallel:4", "cache_reuse:256"]),
        (
            "{backend: llama-cpp, parallel: 4, options: ['n_parallel:2', 'cache_reuse:0']}",
            "Options",
            ["n_parallel:2", "cache_reuse:0"],
        ),
        ("{backend: llama-cpp, parallel: 4, context_size: 1000}", "ContextSize", 4000),
        ("{backend: llama-cpp, options: ['parallel:4'], context_size: 1000}", "ContextSize", 1000),
        ("{backend: vllm, parallel: 4, context_size: 1000}", "ContextSize", 1000),
        ("tensor_parallel: 3", "TensorParallelSize", 3),
        ("{backend: mlx, parameters: {model: w.gguf}}", "Model", "/models/m/w.gguf"),
        ("{options: {Threads: 9}, threads: 1}", "Threads", 9),
        ("flash_attention: disabled", "FlashAttention", "disabled"),
    ],
)
def test_what_follows_from_what(text: str, field: str, value: Any) -> None:
    found = getattr(loaded(text), field)
    assert (found if isinstance(value, str | int) else list(found)) == value


def test_a_proxy_is_only_told_where_it_goes_through_one() -> None:
    text = "proxy: {upstream_url: 'https://elsewhere', request_timeout_seconds: 5, secret: x}\nbackend: "
    assert loaded(text + "cloud-proxy").Proxy == pb.ProxyOptions(
        upstream_url="https://elsewhere", request_timeout_seconds=5
    )
    assert not loaded(text + "llama-cpp").HasField("Proxy")


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("context_size: many", "context_size"),
        ("gpu_layers: 99999999999", "gpu_layers"),
        ("f16: 1", "f16"),
        ("mmproj: ../secret", "mmproj"),
        ("options: [1]", "options"),
        ("cfg_scale: big", "cfg_scale"),
        ("lora_scales: [x]", "lora_scales"),
        ("engine_args: [a]", "engine_args"),
        ("type: [a]", "type"),
    ],
)
def test_what_cannot_be_meant_is_named(text: str, key: str) -> None:
    with pytest.raises(Invalid, match=f"^{key} of the model's definition"):
        loaded(text)
