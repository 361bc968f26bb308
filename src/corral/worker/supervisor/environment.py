"""The environment variables of a backend. Pure.

Backends are foreign code. From the worker's environment they get variables of an allow list, except those that look
like a secret. Variables of a manifest or a model's definition are passed as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from corral.contract.messages.replicas import ReplicaDevice

TOKEN = "LOCALAI_GRPC_AUTH_TOKEN"  # docs/reference/wire/grpc.md#authentication; ours use it on both protocols
PYTHON = "CORRAL_PYTHON"  # the worker's own interpreter, for backends that bring none

ALLOWED = (
    # who and where
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "LC_*", "TZ", "TMPDIR", "XDG_CACHE_HOME",
    # libraries and certificates
    "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "DYLD_FALLBACK_LIBRARY_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR",
    "REQUESTS_CA_BUNDLE", "NIX_*",
    # accelerators
    "CUDA_*", "NVIDIA_*", "NCCL_*", "HIP_*", "HSA_*", "ROCM_*", "ROCR_*", "AMD_*", "GPU_*", "ONEAPI_*", "ZE_*", "ZES_*",
    "SYCL_*", "VK_*", "MESA_*", "METAL_*", "MTL_*",
    # threads and engines
    "OMP_*", "MKL_*", "OPENBLAS_*", "KMP_*", "GOMP_*", "GGML_*", "LLAMA_*", "VLLM_*", "SGLANG_*", "PYTORCH_*",
    "TORCH_*", "TRITON_*", "TOKENIZERS_PARALLELISM",
    # where models are looked for
    "HF_HOME", "HF_ENDPOINT", "HF_HUB_*", "HUGGINGFACE_HUB_CACHE", "TRANSFORMERS_*",
)  # fmt: skip
_SECRET_PARTS = (
    "TOKEN",
    "SECRET",
    "PASSWORD",
    "PASSWD",
    "CREDENTIAL",
    "API_KEY",
    "ACCESS_KEY",
    "PRIVATE",
    "JWT",
    "SEED",
)
_HARMLESS = ("TOKENIZERS_PARALLELISM",)
_OURS = ("CORRAL_", "LOCALAI_", "NATS_")


def inherit(environ: Mapping[str, str], also: Iterable[str] = ()) -> dict[str, str]:
    """The part of the worker's environment that a backend gets. `also`: names that a person allowed; these may be
    secrets (a token for a model hub), but never Corral's own."""
    named = set(also)
    return {
        name: value
        for name, value in environ.items()
        if not name.startswith(_OURS) and (name in named or (_is_listed(name) and not _looks_secret(name)))
    }


def _is_listed(name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in ALLOWED)


def _looks_secret(name: str) -> bool:
    return name not in _HARMLESS and any(part in name for part in _SECRET_PARTS)


def visible_devices(devices: Sequence[ReplicaDevice]) -> dict[str, str]:
    """Variables that limit the process to the accelerators that placement chose."""
    env: dict[str, str] = {}
    for vendor in {device.vendor for device in devices}:
        mine = [device for device in devices if device.vendor == vendor]
        env |= _visible(vendor, [str(device.index) for device in mine], [device.uuid for device in mine])
    return env


def _visible(vendor: str, numbers: list[str], uuids: list[str]) -> dict[str, str]:
    match vendor:
        case "nvidia" if all(uuids):
            return {"CUDA_VISIBLE_DEVICES": ",".join(uuids)}
        case "nvidia":  # the driver numbers devices by their place on the bus; CUDA by speed, unless this is set
            return {"CUDA_VISIBLE_DEVICES": ",".join(numbers), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        case "amd" if all(uuids):
            return {"ROCR_VISIBLE_DEVICES": ",".join(uuids)}
        case "amd":
            return {"HIP_VISIBLE_DEVICES": ",".join(numbers)}
        case "intel":
            return {"ZE_AFFINITY_MASK": ",".join(numbers)}
        case _:
            return {}


def device_list(devices: Sequence[ReplicaDevice]) -> str:
    """For `{devices}` in a command."""
    return ",".join(str(device.index) for device in devices)
