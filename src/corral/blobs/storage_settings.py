"""Settings of the object storage (S3). Workers of a LocalAI fleet need them too, those of a Corral fleet do not."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from corral.kit.settings import BadSettings, plain_http_url, setting


def _endpoint(value: str) -> str | None:
    flags = "--storage-access-key and --storage-secret-key"
    return plain_http_url(value, example="http://storage:9000", secret_flags=flags)


def _bucket(value: str) -> str | None:
    return None if value and "/" not in value else f"{value!r} is not the name of a bucket"


@dataclass(frozen=True)
class StorageSettings:
    """Without a URL there is no object storage, and files travel by HTTP."""

    storage_url: str = setting(
        "URL of an S3 object storage through which model files reach workers; empty = files go directly by HTTP",
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
