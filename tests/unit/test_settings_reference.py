"""docs/reference/settings.md says what the code says, and the contract's names are all understood."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from corral.controller.settings import ControllerSettings
from corral.gateway.settings import GatewaySettings
from corral.kit.settings import describe
from corral.worker.settings import WorkerSettings


def load_generator() -> ModuleType:
    path = Path(__file__).parents[2] / "scripts" / "_reference.py"
    spec = importlib.util.spec_from_file_location("_reference", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_up_to_date() -> None:
    generator = load_generator()
    assert generator.PAGE.read_text() == generator.render(), "run .venv/bin/python scripts/_reference.py"


@pytest.mark.parametrize("kind", [ControllerSettings, GatewaySettings, WorkerSettings])
def test_no_two_settings_answer_to_one_name(kind: type[object]) -> None:
    # LocalAI has host and port in one variable; here they are two settings that read their half of it.
    names = [
        name for doc in describe(kind) for name in (doc.env, doc.flag, *doc.aliases) if name != "LOCALAI_HTTP_ADDR"
    ]
    assert len(names) == len(set(names))


CONTROLLER_NAMES = [
    "LOCALAI_INSTANCE_ID",
    "LOCALAI_NATS_URL",
    "LOCALAI_AUTH_DATABASE_URL",
    "LOCALAI_REGISTRATION_TOKEN",
    "LOCALAI_AUTO_APPROVE_NODES",
    "LOCALAI_NATS_ACCOUNT_SEED",
    "LOCALAI_NATS_SERVICE_JWT",
    "LOCALAI_NATS_SERVICE_SEED",
    "LOCALAI_NATS_WORKER_JWT_TTL",
    "LOCALAI_NATS_TLS_CA",
    "LOCALAI_NATS_TLS_CERT",
    "LOCALAI_NATS_TLS_KEY",
]
WORKER_NAMES = [
    "LOCALAI_REGISTER_TO",
    "LOCALAI_NODE_NAME",
    "LOCALAI_REGISTRATION_TOKEN",
    "LOCALAI_HEARTBEAT_INTERVAL",
    "LOCALAI_NODE_LABELS",
    "LOCALAI_MAX_REPLICAS_PER_MODEL",
    "LOCALAI_VRAM_BUDGET",
    "LOCALAI_BACKENDS_PATH",
    "LOCALAI_BACKENDS_SYSTEM_PATH",
    "LOCALAI_MODELS_PATH",
]


@pytest.mark.parametrize("name", CONTROLLER_NAMES)
def test_the_controller_understands_the_contracts_name(name: str) -> None:
    assert any(name in doc.aliases for doc in describe(ControllerSettings))


@pytest.mark.parametrize("name", WORKER_NAMES)
def test_the_worker_understands_the_contracts_name(name: str) -> None:
    assert any(name in doc.aliases for doc in describe(WorkerSettings))
