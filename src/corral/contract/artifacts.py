"""Repositories of the hub that a model consists of: `artifacts` of a definition
(docs/reference/wire/gallery.md#model-definition), or a URI that names all of a repository. Pure; `contract/models.py`
reads the rest of a definition."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from corral.contract.codec import Message, always
from corral.contract.sources import is_repository_id, is_safe_path, parse_repository
from corral.kit.errors import Invalid

_MAIN, _MASTER = "main", "master"  # branches of the Hugging Face hub and of ModelScope
_KINDS = ("huggingface", "modelscope")
_WEIGHT_FILES = (".gguf", ".ggml", ".bin", ".safetensors", ".pt", ".pth", ".onnx")


class HubSnapshot(Message, frozen=True):
    """A repository, all of it or what the patterns leave."""

    folder: str = always(str)  # below the model's own folder: where its files lie as they lie in the repository
    repo: str = always(str)  # owner/name
    revision: str = _MAIN
    allow: tuple[str, ...] = ()  # shell patterns over the path; none: everything
    ignore: tuple[str, ...] = ()
    is_modelscope: bool = False  # of ModelScope, whichever hub is the usual one


def snapshot_of(uri: str, folder: str = "") -> HubSnapshot | None:
    """None for what is not all of a repository. Without a folder it lies under its own name."""
    repository = parse_repository(uri)
    if repository is None:
        return None
    main = _MASTER if repository.is_modelscope else _MAIN
    return HubSnapshot(
        folder.rstrip("/") or repository.id,
        repository.id,
        repository.revision or main,
        is_modelscope=repository.is_modelscope,
    )


def read_artifacts(mapping: Mapping[str, Any], weights: str) -> tuple[HubSnapshot, ...]:
    """`weights`: what the definition calls them. Raises Invalid."""
    listed = mapping.get("artifacts") or []
    if not isinstance(listed, list):
        raise Invalid("artifacts is a list of name, target and source")
    return tuple(_artifact(item, position, weights) for position, item in enumerate(listed, 1))


def artifact_weights(mapping: Mapping[str, Any]) -> str:
    """The weights, relative to the model's folder, of a definition that leaves saying so to its first artifact."""
    listed = mapping.get("artifacts")
    first = listed[0] if isinstance(listed, list) and listed else None
    if not isinstance(first, Mapping):
        return ""
    repo, primary = _text(_inside(first, "source"), "repo"), _text(_inside(first, "resolved"), "primary_file")
    return f"{repo}/{primary}" if repo and primary else repo


def _artifact(item: object, position: int, weights: str) -> HubSnapshot:
    where = f"artifacts, entry {position}"
    if not isinstance(item, Mapping):
        raise Invalid(f"{where}: a mapping of name, target and source")
    source, resolved = _inside(item, "source"), _inside(item, "resolved")
    kind, repo = _text(source, "type") or "huggingface", _text(source, "repo")
    target = _text(item, "target") or ("model" if position == 1 else "companion")
    if kind not in _KINDS:
        raise Invalid(f"{where}: type {kind!r} is not known; {' and '.join(_KINDS)} are")
    if not is_repository_id(repo):
        raise Invalid(f"{where}: repo {repo!r} is not a repository's name; write owner/name")
    if target not in ("model", "companion"):
        raise Invalid(f"{where}: target is model or companion")
    folder = repo
    if target == "model" and weights and not _is_a_file_of_it(weights, resolved):
        folder = weights.rstrip("/")  # what the definition calls its weights is found under that name
    elif target == "companion" and (name := _text(item, "name")):
        folder = name
    if not is_safe_path(folder):
        raise Invalid(f"{where}: {folder!r} does not stay inside the model's folder")
    is_modelscope = kind == "modelscope"
    revision = _text(resolved, "revision") or _text(source, "revision") or (_MASTER if is_modelscope else _MAIN)
    allow, ignore = _texts(source, "allow_patterns"), _texts(source, "ignore_patterns")
    return HubSnapshot(folder, repo, revision, allow, ignore, is_modelscope)


def _is_a_file_of_it(weights: str, resolved: Mapping[str, Any]) -> bool:
    return weights == resolved.get("primary_file") or "://" in weights or weights.lower().endswith(_WEIGHT_FILES)


def _inside(mapping: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = mapping.get(key) or {}
    if not isinstance(value, Mapping):
        raise Invalid(f"artifacts: {key} is a mapping")
    return value


def _text(mapping: Mapping[str, Any], key: str) -> str:
    value = mapping.get(key) or ""
    if not isinstance(value, str) or "\0" in value:
        raise Invalid(f"artifacts: {key} is a text")
    return value.strip()


def _texts(mapping: Mapping[str, Any], key: str) -> tuple[str, ...]:
    value = mapping.get(key) or []
    if not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
        raise Invalid(f"artifacts: {key} is a list of patterns")
    return tuple(value)
