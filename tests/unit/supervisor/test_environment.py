"""What passes from the worker's environment to a backend's."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.contract.messages.replicas import ReplicaDevice
from corral.worker.supervisor.environment import device_list, inherit, visible_devices

PASS = """PATH HOME LC_ALL LD_LIBRARY_PATH CUDA_HOME NVIDIA_VISIBLE_DEVICES HSA_OVERRIDE_GFX_VERSION OMP_NUM_THREADS
    HF_HUB_OFFLINE VLLM_LOGGING_LEVEL TOKENIZERS_PARALLELISM TRANSFORMERS_CACHE"""
STAY = """CORRAL_TOKEN CORRAL_DATA LOCALAI_REGISTRATION_TOKEN LOCALAI_GRPC_AUTH_TOKEN NATS_CREDS NATS_URL HF_TOKEN
    AWS_SECRET_ACCESS_KEY VLLM_API_KEY CUDA_PASSWORD SSH_AUTH_SOCK PYTHONPATH VIRTUAL_ENV LD_PRELOAD http_proxy path
    PATHX XPATH"""


@pytest.mark.parametrize("name", PASS.split())
def test_these_pass(name: str) -> None:
    assert inherit({name: "1"}) == {name: "1"}


@pytest.mark.parametrize("name", STAY.split())
def test_these_do_not(name: str) -> None:
    assert inherit({name: "1"}) == {}


def test_a_person_can_let_through_what_is_not_ours() -> None:
    env = {"HF_TOKEN": "t", "http_proxy": "p", "CORRAL_TOKEN": "c", "LOCALAI_X": "l"}
    assert inherit(env, also=tuple(env)) == {"HF_TOKEN": "t", "http_proxy": "p"}


@given(st.dictionaries(st.text(max_size=30), st.text()), st.lists(st.text(max_size=30)))
def test_nothing_of_ours_ever_passes(env: dict[str, str], also: list[str]) -> None:
    ours = {f"CORRAL_{name}": "x" for name in env} | {f"LOCALAI_{name}": "x" for name in env}
    assert not set(inherit(env | ours, [*also, *ours])) & set(ours)


def device(vendor: str, index: int, uuid: str = "") -> ReplicaDevice:
    return ReplicaDevice(vendor=vendor, index=index, uuid=uuid)


@pytest.mark.parametrize(
    ("devices", "env"),
    [
        ((), {}),
        ((device("nvidia", 2),), {"CUDA_VISIBLE_DEVICES": "2", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}),
        ((device("nvidia", 0, "GPU-a"), device("nvidia", 1, "GPU-b")), {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"}),
        (
            (device("nvidia", 0, "GPU-a"), device("nvidia", 1)),
            {"CUDA_VISIBLE_DEVICES": "0,1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
        ),
        ((device("amd", 1),), {"HIP_VISIBLE_DEVICES": "1"}),
        ((device("amd", 1, "GPU-f"),), {"ROCR_VISIBLE_DEVICES": "GPU-f"}),
        ((device("intel", 0),), {"ZE_AFFINITY_MASK": "0"}),
        ((device("apple", 0),), {}),
    ],
)
def test_devices_in_the_words_of_each_vendor(devices: tuple[ReplicaDevice, ...], env: dict[str, str]) -> None:
    assert visible_devices(devices) == env


def test_devices_in_a_command() -> None:
    assert device_list((device("nvidia", 0), device("nvidia", 3))) == "0,3"
