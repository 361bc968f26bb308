"""From an order for a replica to the process to start. Pure, but for the look at files that must be there.

Of the model's definition the worker reads a few names and leaves the rest to the engine: `parameters.model` (the
weights, a path below the models folder, or one of `files`), `context_size`, `parallel`, `env`. What a gRPC backend is
told of the rest when it loads is `inference/load_options.py`'s.
"""

from __future__ import annotations

import os
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil

from corral.contract.manifest import GRPC
from corral.contract.messages.replicas import ReplicaFile, StartReplica
from corral.contract.sources import is_safe_path
from corral.inference.load_options import LoadTarget, load_options, weights_of
from corral.kit.errors import Invalid, NotFound
from corral.worker.installer.inventory import InstalledBackend
from corral.worker.supervisor.spec import ProcessSpec, load_timeout_s
from corral.worker.supervisor.states import RestartPolicy

# A replica that keeps ending is told to have failed after a quarter of a minute: whoever placed it may know a better
# machine. One that ran for a while starts counting anew.
RESTARTS = RestartPolicy(most=4)


def spec_of(order: StartReplica, build: InstalledBackend, models: Path) -> ProcessSpec:
    """Raises Invalid for what can never be started, NotFound for files that are not here."""
    protocol = build.manifest.protocol
    if order.protocol and order.protocol != protocol:
        raise Invalid(f"{order.backend} speaks {protocol} here, not {order.protocol}")
    files = [find_file(models, file) for file in order.files]
    definition = order.definition
    weights = _weights(files, definition, models)
    folder = _folder(files, weights, definition, models)
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
        model_dir=str(_model_dir(weights, models)),
        context_size=_context_size(definition),
        slots=_number(definition, "parallel"),
        words=_words(definition, folder),
        devices=order.devices,
        memory_bytes=order.memory_bytes,
        env=_environment(definition),
        load=_load_options(order, weights, folder, protocol),
        definition=dict(definition),
        load_timeout_s=load_timeout_s(sum(file.stat().st_size for file in files if file.is_file())),
        restart=RESTARTS,
    )


def find_file(models: Path, file: ReplicaFile) -> Path:
    """Where a file the order names lies by now: what has a digest was brought here before (`worker/files/`)."""
    root = models.resolve()
    path = Path(file.path)
    if path.is_absolute():
        if not path.resolve().is_relative_to(root):
            raise Invalid(f"{file.path} is not in the models folder of this worker")
    elif not is_safe_path(file.path):
        raise Invalid(f"{file.path[:200]!r} leads out of the models folder")
    path = root / path
    if not path.exists():
        raise NotFound(f"{file.path} is not on this machine, and the order does not say what it is")
    if file.size_bytes and path.is_file() and path.stat().st_size != file.size_bytes:
        raise NotFound(f"{file.path} has {path.stat().st_size} bytes here, not {file.size_bytes}")
    return path


def _weights(files: Sequence[Path], definition: Mapping[str, Any], models: Path) -> Path | None:
    """Of the files that were ordered the one the definition names, or the folder it names that holds them, or the
    first; with none ordered, what lies in the models folder already. None: only the engine understands the name."""
    named = weights_of(definition)
    safe = bool(named) and is_safe_path(named)
    if not files:
        path = models / named if safe else None
        return path if path is not None and path.exists() else None
    if safe:
        wanted, root = Path(named).parts, models.resolve()
        for file in files:
            for path in (file, *file.parents):
                if root in path.parents and path.parts[-len(wanted) :] == wanted:
                    return path
    return files[0]


def _model_dir(weights: Path | None, models: Path) -> Path:
    """The folder the weights are in; weights that are a folder are in it themselves."""
    if weights is None:
        return models
    return weights if weights.is_dir() else weights.parent


def _folder(files: Sequence[Path], weights: Path | None, definition: Mapping[str, Any], models: Path) -> Path:
    """From where the definition's other names count: the weights' path without their own name."""
    if not files or weights is None:
        return models
    wanted = Path(weights_of(definition)).parts
    if wanted and weights.parts[-len(wanted) :] == wanted:
        return Path(*weights.parts[: -len(wanted)])
    return weights.parent


def _load_options(order: StartReplica, weights: Path | None, folder: Path, protocol: str) -> str:
    """Of any process: a later build of its backend may speak gRPC where this one does not. But what only gRPC could not
    understand is no fault of a process that does not speak it."""
    place = LoadTarget(
        folder=str(folder),
        model_file=str(weights) if weights is not None else "",
        threads=psutil.cpu_count(logical=False) or os.cpu_count() or 4,
        seed=random.getrandbits(31),
        exists=os.path.exists,
    )
    try:
        return msgspec.json.encode(load_options(order.definition, order.model, order.backend, place)).decode()
    except Invalid:
        if protocol == GRPC:
            raise
        return ""


def _context_size(definition: Mapping[str, Any]) -> int:
    """-1 stands for all the model was trained for, which the engine knows; 0 says nothing, and so it decides."""
    return 0 if definition.get("context_size") == -1 else _number(definition, "context_size")


def _words(definition: Mapping[str, Any], folder: Path) -> dict[str, str]:
    """What a manifest's command may want to know of the definition, beyond the weights."""
    parameters = definition.get("parameters")
    pooling = parameters.get("pooling") if isinstance(parameters, Mapping) else None
    projector = definition.get("mmproj")
    words = {
        "mode": "embeddings" if definition.get("embeddings") else "reranking" if definition.get("reranking") else "",
        "pooling": pooling if isinstance(pooling, str) else "",
        "threads": str(_number(definition, "threads") or ""),
        "gpu_layers": str(_number(definition, "gpu_layers") or ""),
        "mmproj": str(folder / projector) if isinstance(projector, str) and is_safe_path(projector) else "",
    }
    return {name: word for name, word in words.items() if word}


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
