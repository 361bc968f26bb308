"""From an order for a replica to the process to start. Pure, but for the look at files that must be there.

Of the model's definition the worker reads a few names and leaves the rest to the engine: `model` (the weights, a path
below the models folder, unless `files` says it), `context_size`, `parallel`, `env`, and for gRPC backends `options`,
which are LoadModel's own fields, verbatim.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from corral.contract.manifest import GRPC
from corral.contract.messages.replicas import ReplicaFile, StartReplica
from corral.contract.sources import is_safe_path
from corral.kit.errors import Invalid, NotFound
from corral.worker.installer.inventory import InstalledBackend
from corral.worker.supervisor.spec import ProcessSpec, load_timeout_s


def spec_of(order: StartReplica, build: InstalledBackend, models: Path) -> ProcessSpec:
    """Raises Invalid for what can never be started, NotFound for files that are not here."""
    protocol = build.manifest.protocol
    if order.protocol and order.protocol != protocol:
        raise Invalid(f"{order.backend} speaks {protocol} here, not {order.protocol}")
    files = [find_file(models, file) for file in order.files]
    weights = files[0] if files else _named_weights(order.definition, models)
    definition = order.definition
    return ProcessSpec(
        backend=order.backend,
        directory=str(build.directory),
        manifest=build.manifest,
        model=order.model,
        replica=order.replica,
        revision=order.revision,
        digest=build.digest,
        process_id=order.process_id,
        model_file=str(weights) if weights is not None else "",
        model_dir=str(weights.parent) if weights is not None else str(models),
        context_size=_number(definition, "context_size"),
        slots=_number(definition, "parallel"),
        devices=order.devices,
        memory_bytes=order.memory_bytes,
        env=_environment(definition),
        load=_load_options(order, weights, models) if protocol == GRPC else "",
        load_timeout_s=load_timeout_s(sum(file.stat().st_size for file in files if file.is_file())),
    )


def find_file(models: Path, file: ReplicaFile) -> Path:
    """Where a file the order names lies already. Fetching files is not this worker's yet."""
    root = models.resolve()
    path = Path(file.path)
    if path.is_absolute():
        if not path.resolve().is_relative_to(root):
            raise Invalid(f"{file.path} is not in the models folder of this worker")
    elif not is_safe_path(file.path):
        raise Invalid(f"{file.path[:200]!r} leads out of the models folder")
    path = root / path
    if not path.exists():
        raise NotFound(f"{file.path} is not on this machine, and this worker does not fetch model files")
    if file.size_bytes and path.is_file() and path.stat().st_size != file.size_bytes:
        raise NotFound(f"{file.path} has {path.stat().st_size} bytes here, not {file.size_bytes}")
    return path


def _named_weights(definition: Mapping[str, Any], models: Path) -> Path | None:
    named = definition.get("model")
    if not isinstance(named, str) or not named:
        return None
    path = models / named if is_safe_path(named) else None
    return path if path is not None and path.exists() else None  # else it is a name only the engine understands


def _load_options(order: StartReplica, weights: Path | None, models: Path) -> str:
    named = order.definition.get("model")
    fields: dict[str, Any] = {
        "Model": named if isinstance(named, str) and named else order.model,
        "ModelFile": str(weights) if weights is not None else "",
        "ModelPath": str(models),
        "ContextSize": _number(order.definition, "context_size"),
    }
    options = order.definition.get("options") or {}
    if not isinstance(options, Mapping):
        raise Invalid("the definition's options are not a table of LoadModel's fields")
    merged = {key: value for key, value in fields.items() if value} | dict(options)
    return msgspec.json.encode(merged).decode()


def _number(definition: Mapping[str, Any], name: str) -> int:
    value = definition.get(name) or 0
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise Invalid(f"{name} of the model's definition is no number: {value!r}")
    return value


def _environment(definition: Mapping[str, Any]) -> dict[str, str]:
    env = definition.get("env") or {}
    if not isinstance(env, Mapping) or not all(isinstance(value, str) for value in env.values()):
        raise Invalid("env of the model's definition is not a table of texts")
    return {str(key): value for key, value in env.items()}
