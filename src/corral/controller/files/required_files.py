"""Finds the files a model needs, and their paths on a worker. Pure, except that it reads the models folder.

Files come from `download_files`, from values of the definition that are URIs themselves, and from the controller's own
models folder. The weights come first: every engine gets the path of that file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qs, quote, unquote, urlencode, urlsplit

import msgspec

from corral.blobs.digests import PREFIX, digest_of_parts
from corral.contract.artifacts import HubSnapshot, snapshot_of
from corral.contract.messages.replicas import ReplicaFile
from corral.contract.models import Definition, ModelFile
from corral.contract.sources import file_name, is_repository_id, is_safe_path
from corral.controller.files.snapshots import row_path, uri_of
from corral.kit.errors import Invalid
from corral.store.tables.model_files import StoredFile

MEMBER_SCHEME = "unpacked://"
SET_LENGTH = 12
_COMPANIONS = ("mmproj", "draft_model", "lora_adapter", "lora_base")
_READ_FOLDERS = ("transformers", "vllm", "sglang", "diffusers", "mlx")
_SIDECARS = (".sha256", ".sha256.target")
_ARCHIVE = re.compile(r"\.(?:tar(?:\.(?:gz|bz2|xz|zst))?|tgz|tbz2?|txz|tzst|zip)\Z", re.IGNORECASE)


def required_snapshots(definition: Definition, folder: Path | None = None) -> tuple[HubSnapshot, ...]:
    """Repositories of the hub: those that the definition names, and the one a bare name stands for
    (docs/reference/wire/gallery.md#model-definition) where the engine reads folders and the models folder has none."""
    if definition.snapshots or definition.files:
        return definition.snapshots
    weights, backend = definition.weights, definition.backend.lower()
    if not is_repository_id(weights) or not any(word in backend for word in _READ_FOLDERS):
        return ()
    # Not the path's own `exists`, which raises for a name that is too long to be one; so below.
    return () if folder is not None and os.path.exists(folder / weights) else (HubSnapshot(weights, weights),)


def required_files(definition: Definition, folder: Path | None = None) -> tuple[ModelFile, ...]:
    """All files except those of repositories; empty for a model whose engine fetches by itself. `folder`: where a file
    without a source may be."""
    listed = {file.path: file for file in definition.files}
    brought = [each.folder for each in required_snapshots(definition, folder)]
    first: list[ModelFile] = []
    for position, word in enumerate(named_in(definition)):
        if snapshot_of(word) is not None or any(f"{word}/".startswith(f"{each}/") for each in brought):
            continue
        found = [listed[word]] if word in listed else _implied(word, definition.files, folder)
        if position == 0 and definition.weights:
            first = found
        for file in found:
            known = listed.setdefault(file.path, file)
            if known.uri != file.uri:
                raise Invalid(f"{definition.name}: two files are called {file.path}")
    return (*first, *(file for file in listed.values() if file not in first))


def named_in(definition: Definition) -> Iterator[str]:
    """The weights first, then what goes with them: paths below the models folder, or URIs."""
    if definition.weights:
        yield definition.weights
    for key in _COMPANIONS:
        value = definition.whole.get(key)
        if isinstance(value, str) and value:
            yield value
    adapters = definition.whole.get("lora_adapters")
    for value in adapters if isinstance(adapters, list) else ():
        if isinstance(value, str) and value:
            yield value


def _implied(word: str, listed: Sequence[ModelFile], folder: Path | None) -> list[ModelFile]:
    if "://" in word:
        same = [file for file in listed if file.uri == word]
        return same[:1] or [ModelFile(file_name(word), word)]
    if folder is None or not is_safe_path(word):
        return []
    path = folder / word
    if os.path.isfile(path):
        return [ModelFile(word, path.absolute().as_uri())]
    return list(files_inside(path, folder)) if os.path.isdir(path) else []


def files_inside(path: Path, folder: Path) -> Iterator[ModelFile]:
    """Every file of a folder that is a model, except hidden files and checksums."""
    for file in sorted(path.rglob("*")):
        hidden = any(part.startswith(".") for part in file.relative_to(folder).parts)
        if file.is_file() and not hidden and not file.name.endswith(_SIDECARS):
            yield ModelFile(file.relative_to(folder).as_posix(), file.absolute().as_uri())


def is_archive(definition: Definition, file: ModelFile) -> bool:
    """Whether it is unpacked next to itself: what a definition lists is, by its ending
    (docs/reference/wire/gallery.md#downloads)."""
    return _ARCHIVE.search(file.path) is not None and file in definition.files


def is_named(definition: Definition, file: ModelFile) -> bool:
    """Whether the definition speaks of the file itself, and not only of what is inside."""
    return file.path in named_in(definition)


def weights_first(definition: Definition, files: Sequence[ReplicaFile]) -> list[ReplicaFile]:
    """In their order, but the definition's weights first, also where they were inside an archive."""
    weights = definition.weights.rstrip("/")
    if not any(is_archive(definition, file) for file in definition.files):
        return list(files)
    return sorted(files, key=lambda file: not (weights and f"{file.path}/".startswith(f"{weights}/")))


def current_files(definition: Definition, stored: Sequence[StoredFile]) -> list[StoredFile]:
    """The stored files that the present definition means: an edit may have replaced the rest, whose rows stay until the
    new files are here. Without lists of repositories."""
    listed = {file.path: file for file in definition.files}
    names = tuple(named_in(definition))
    rows = {row.path: row for row in stored}
    repositories = [
        each
        for each in required_snapshots(definition)
        if (row := rows.get(row_path(each))) is not None and row.uri == uri_of(each)
    ]

    def is_current(row: StoredFile) -> bool:
        if not row.digest:
            return True  # of the shared models folder: what was found there when the definition was last read
        if is_member(row.uri):
            member = parse_member(row.uri)
            archive = listed.get(member.path)
            return archive is not None and digest_of_file(archive) in ("", member.archive)
        if (file := listed.get(row.path)) is not None:
            return row.uri == file.uri and digest_of_file(file) in ("", row.digest)
        if any(row.path.startswith(f"{each.folder}/") for each in repositories):
            return True
        in_folder = row.uri.startswith("file:") and any(f"{row.path}/".startswith(f"{name}/") for name in names)
        return in_folder or row.uri in names

    return [row for row in stored if not row.is_list and is_current(row)]


def digest_of_file(file: ModelFile) -> str:
    """The declared digest; empty when there is none."""
    return PREFIX + file.sha256 if file.sha256 else ""


def worker_files(model: str, files: Sequence[ReplicaFile]) -> tuple[ReplicaFile, ...]:
    """The same files where a worker keeps them, below its models folder: `<model>/<which set of files>/<path>`.

    A set has a folder of its own: when a model is edited, processes of the revision before go on reading theirs, and
    may be started again from it. With the same files it is the same set, and nothing is fetched.
    """
    digest = digest_of_parts(*(f"{file.path} {file.digest}" for file in files)).removeprefix(PREFIX)
    folder = f"{model}/{digest[:SET_LENGTH]}"
    return tuple(msgspec.structs.replace(file, path=f"{folder}/{file.path}") for file in files)


class MemberUri(NamedTuple):
    """How a file that was inside an archive is named in the database: with all that is needed to get it again."""

    archive: str  # digest
    member: str
    path: str  # of the archive among the model's files
    uri: str  # of the archive


def member_uri(member: MemberUri) -> str:
    where = urlencode({"path": member.path, "uri": member.uri})
    return f"{MEMBER_SCHEME}{member.archive.removeprefix(PREFIX)}/{quote(member.member)}?{where}"


def is_member(uri: str) -> bool:
    return uri.startswith(MEMBER_SCHEME)


def parse_member(uri: str) -> MemberUri:
    parts = urlsplit(uri)
    where = parse_qs(parts.query, keep_blank_values=True)
    return MemberUri(PREFIX + parts.netloc, unquote(parts.path.lstrip("/")), where["path"][0], where["uri"][0])
