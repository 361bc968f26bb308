"""Installing a model from anywhere: the plan that the controller makes of a source, and uploads of files from the
machine of the caller. All of it is ours (docs/reference/model-files.md)."""

from __future__ import annotations

from typing import Any

import msgspec

from corral.contract.codec import Message, always
from corral.contract.gguf import GgufHeader

UPLOAD_SCHEME = "upload://"  # upload://<sha256 in hex>/<name>: a file that was uploaded to the controller
MAX_SOURCE_LENGTH = 1000


def shown_uri(uri: str) -> str:
    """For users: a file that was uploaded has no source that they could open."""
    return "uploaded" if uri.startswith(UPLOAD_SCHEME) else uri


class LocalFile(Message, frozen=True):
    """A file on the machine of the caller, which is not uploaded yet."""

    name: str = always(str)  # without folders
    size_bytes: int = always(int)
    sha256: str = always(str)  # bare hex


class PlanModel(Message, frozen=True):
    """`POST /api/model-plans`: either a source, or files of the caller's machine."""

    source: str = ""  # hf://owner/repo[:quant], hf://owner/repo/file.gguf, https://host/file.gguf
    files: tuple[LocalFile, ...] = ()  # all parts of one GGUF file, in order
    header: GgufHeader | None = None  # of the first of `files`
    projector: LocalFile | None = None  # the mmproj file that goes with `files`
    quant: str = ""  # this quantisation; empty: the best that fits
    name: str = ""  # of the model in this fleet; empty: derived
    overrides: dict[str, Any] = msgspec.field(default_factory=dict)  # laid over the definition


class PlannedChoice(Message, frozen=True):
    """One quantisation of the source, and where it fits."""

    quant: str = always(str)  # empty: the name of the file has none
    size_bytes: int = always(int)  # of its files; 0: unknown
    memory_bytes: int = 0  # that one process needs, with the context size of the plan; 0: unknown
    fits_on: tuple[str, ...] = always(tuple)  # nodes, best first; also those that run other models now
    chosen: bool = False
    text: str = always(str)  # Q4_K_M, 4.9 GB: fits on node-a (GPU 0: 23.5 GB free of 24.0 GB)


class InstallPlan(Message, frozen=True):
    """What an install would do. `POST /api/models` with the definition does it."""

    source: str = always(str)  # with the commit, where the source has one
    definition: dict[str, Any] = msgspec.field(default_factory=dict)
    choices: tuple[PlannedChoice, ...] = always(tuple)  # best first
    text: str = always(str)  # the choice in one sentence
    notes: tuple[str, ...] = ()
    fits: bool = always(bool)  # some node has the memory


class OpenUpload(Message, frozen=True):
    """`POST /api/uploads`, `POST /api/bundles/uploads`: begin or continue the operation of an upload. `files` is all
    that is sent. `command` and `host` are shown to users, as the way to continue."""

    name: str = always(str)  # of the file or the bundle
    files: tuple[LocalFile, ...] = always(tuple)
    bundle: str = ""  # digest of the bundle, where the files are those of one
    command: str = ""
    host: str = ""  # the machine of the sender
    continues: str = ""  # the operation that the sender was in, when it asks again


class UploadOpened(Message, frozen=True):
    """The operation; empty where everything was here already. Pieces name it with `?operation=`."""

    operation_id: str = ""
    received_bytes: int = always(int)
    total_bytes: int = always(int)


class UploadView(Message, frozen=True):
    """`GET`, `PUT`, `DELETE /api/uploads/{sha256}`: how much of a file is here."""

    sha256: str = always(str)  # bare hex
    received_bytes: int = always(int)
    size_bytes: int = 0  # 0: unknown
    complete: bool = always(bool)  # all bytes are here, and their hash is right
