"""Settings of the object storage (S3), which controller and workers of a LocalAI fleet share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from corral.kit.settings import BadSettings, setting


def _endpoint(value: str) -> str | None:
    try:
        parts = urlsplit(value)
        usable = parts.scheme in ("http", "https") and parts.hostname and (parts.port or 1)
    except ValueError:
        usable = False
    if not usable:
        return "not a URL; give one such as http://storage:9000"
    if parts.username or parts.password:
        return "the URL carries a password; give --storage-access-key and --storage-secret-key instead"
    if parts.query or parts.fragment:
        return f"{value!r} has a query; give only scheme, host and port"
    return None


def _bucket(value: str) -> str | None:
    return None if value and "/" not in value else f"{value!r} is not the name of a bucket"


@dataclass(frozen=True)
class StorageSettings:
    """Without a URL there is no object storage, and files travel by HTTP."""

    storage_url: str = setting(
        "URL of an S3 object storage through which a LocalAI fleet moves files; empty = files go directly by HTTP",
        default="",
        aliases=("LOCALAI_STORAGE_URL",),
        parse=lambda text: text.strip().rstrip("/"),
        check=_endpoint,
        advanced=True,
    )
    storage_bucket: str = setting(
        "bucket of the object storage",
        default="localai",
        aliases=("LOCALAI_STORAGE_BUCKET",),
        check=_bucket,
        advanced=True,
    )
    storage_region: str = setting(
        "region of the object storage", default="us-east-1", aliases=("LOCALAI_STORAGE_REGION",), advanced=True
    )
    storage_access_key: str = setting(
        "access key of the object storage; empty = the AWS credentials of the environment or the machine",
        default="",
        secret=True,
        aliases=("LOCALAI_STORAGE_ACCESS_KEY",),
        advanced=True,
    )
    storage_secret_key: str = setting(
        "secret key of the object storage",
        default="",
        secret=True,
        aliases=("LOCALAI_STORAGE_SECRET_KEY",),
        advanced=True,
    )
    storage_ca: Path | None = setting(
        "CA of the object storage (PEM), in addition to those of the system", default=None, advanced=True
    )

    def __post_init__(self) -> None:
        faults = []
        if bool(self.storage_access_key) != bool(self.storage_secret_key):
            faults.append("storage-access-key and storage-secret-key come together or not at all")
        if self.storage_ca is not None and not self.storage_ca.is_file():
            faults.append(f"storage-ca: there is no file {str(self.storage_ca)!r}")
        if faults:
            raise BadSettings(faults)

    @property
    def is_configured(self) -> bool:
        return bool(self.storage_url)
