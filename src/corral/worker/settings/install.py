"""Settings of the installer: galleries, downloads, model files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from corral.gallery.galleries import DEFAULT_GALLERIES, check_galleries
from corral.kit.settings import Seconds, positive, setting


@dataclass(frozen=True)
class InstallSettings:
    galleries: str = setting(
        "galleries this worker looks in when an order names no source: a JSON list of {name, url, mirrors}; [] = none",
        default=DEFAULT_GALLERIES,
        aliases=("LOCALAI_BACKEND_GALLERIES", "BACKEND_GALLERIES"),
        check=check_galleries,
        advanced=True,
    )
    gallery_folder: Path | None = setting(
        "galleries that are files must be in here; empty = galleries in the data folder", default=None, advanced=True
    )
    gallery_timeout_s: Seconds = setting(
        "how long one place of a gallery may take to send it", default=Seconds(120), check=positive, advanced=True
    )
    insecure_registries: tuple[str, ...] = setting(
        "image registries asked over plain HTTP (host:port); those on this machine always are", default=()
    )
    install_system_packages: bool = setting(
        "as root on Debian, install the system packages that a backend says it needs; else say the command to type",
        default=True,
    )
    download_stall_s: Seconds = setting(
        "a download on which nothing came for so long is begun again where it stopped",
        default=Seconds(60),
        check=positive,
        advanced=True,
    )
    nearby_blobs: Path | None = setting(
        "folder of model files by digest of a controller on this machine, on the same disk: linked instead of fetched",
        default=None,
        advanced=True,
    )
    keep_unused_files_s: Seconds = setting(
        "files of models that nothing was started from for so long are removed; sooner when the disk is full",
        default=Seconds(7 * 86400),
        check=positive,
        advanced=True,
    )
