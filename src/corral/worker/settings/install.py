"""Settings of the installer: galleries, downloads, model files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from corral.gallery.galleries import DEFAULT_GALLERIES, check_galleries
from corral.kit.humanize import parse_byte_count
from corral.kit.settings import Seconds, not_negative, positive, setting


@dataclass(frozen=True)
class InstallSettings:
    galleries: str = setting(
        "galleries to use when an order names no source: a JSON list of {name, url, mirrors}; [] = none",
        default=DEFAULT_GALLERIES,
        aliases=("LOCALAI_BACKEND_GALLERIES", "BACKEND_GALLERIES"),
        check=check_galleries,
        advanced=True,
    )
    gallery_folder: Path | None = setting(
        "folder of galleries that are files; empty = galleries in the data folder", default=None, advanced=True
    )
    gallery_timeout_s: Seconds = setting(
        "timeout for fetching a gallery from one URL", default=Seconds(120), check=positive, advanced=True
    )
    insecure_registries: tuple[str, ...] = setting(
        "image registries to call over plain HTTP (host:port); those on this machine always are", default=()
    )
    install_system_packages: bool = setting(
        "as root on Debian, install the system packages that a backend needs; otherwise the error names the command",
        default=True,
    )
    download_stall_s: Seconds = setting(
        "a download without data for this time is resumed on a new connection",
        default=Seconds(60),
        check=positive,
        advanced=True,
    )
    max_upload: float = setting(
        "bytes per second that this worker sends to other workers, such as 20MB or 512KiB; 0 = no limit",
        default=0.0,
        parse=parse_byte_count,
        check=not_negative,
    )
    max_download: float = setting(
        "bytes per second at which this worker fetches model files from controllers and other workers; 0 = no limit",
        default=0.0,
        parse=parse_byte_count,
        check=not_negative,
    )
    nearby_blobs: Path | None = setting(
        "blob folder of a controller on this machine and disk: model files there are linked instead of fetched",
        default=None,
        advanced=True,
    )
    cache_limit: float = setting(
        "disk space for fetched model files, such as 200GiB: above it, the files not used for longest are removed; "
        "files that a process reads stay; 0 = as much as the disk holds",
        default=0.0,
        parse=parse_byte_count,
        check=not_negative,
    )
    keep_unused_files_s: Seconds = setting(
        "model files that no process used for this time are removed; earlier when the disk is full",
        default=Seconds(7 * 86400),
        check=positive,
        advanced=True,
    )
