"""Settings of model files: where they come from, where they are kept, how workers get them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from corral.contract.sources import HUB
from corral.kit.checks import a_port, positive
from corral.kit.settings import Seconds, setting


def _url(value: str) -> str | None:
    return None if value.startswith(("http://", "https://")) else f"{value!r} is not a URL"


@dataclass(frozen=True)
class FileSettings:
    blob_host: str = setting("address workers fetch model files from", default="127.0.0.1")
    blob_port: int | None = setting(
        "port of the same (8090, or a free one when that is taken); 0 = any free one", default=None, check=a_port
    )
    blob_port_moves: bool = setting(
        "any free port when the one above is taken; workers are told with each order", default=False, advanced=True
    )
    blob_url: str = setting(
        "URL of the same for workers; `{host}` stands for the host by which they reach the cluster, `{port}` for the "
        "port; empty = host and port of the above",
        default="",
        check=lambda value: _url(value) if value else None,
    )
    blob_tls_cert: Path | None = setting("certificate of the same (PEM)", default=None)
    blob_tls_key: Path | None = setting("key of the same (PEM)", default=None)
    blobs: Path | None = setting("folder of fetched model files; empty = blobs in the data folder", default=None)
    file_folders: tuple[str, ...] = setting(
        "folders of this machine that file:// sources of models may lead into, besides models in the data folder",
        default=(),
    )
    huggingface_token: str = setting(
        "token for files on the hub; it never leaves the controller",
        default="",
        secret=True,
        aliases=("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"),
        parse=str.strip,
    )
    huggingface_url: str = setting(
        "where huggingface:// leads", default=HUB, aliases=("HF_ENDPOINT",), check=_url, advanced=True
    )
    download_stall_s: Seconds = setting(
        "a download on which nothing came for so long is begun again where it stopped",
        default=Seconds(60),
        check=positive,
        advanced=True,
    )
    keep_blobs_s: Seconds = setting(
        "files that no model needs are removed after so long", default=Seconds(3600), check=positive, advanced=True
    )
