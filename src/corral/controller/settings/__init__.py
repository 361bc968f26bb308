"""Every setting of `corral controller`, in groups: each subsystem receives its group whole."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from corral.blobs.storage_settings import StorageSettings
from corral.controller.settings.backends import BackendSettings
from corral.controller.settings.models import FileSettings, GallerySettings, ModelSettings, ReplicaSettings
from corral.controller.settings.nodes import HealthSettings, LocalAISettings, RegistrationSettings, RuntimeSettings
from corral.controller.settings.serving import AccessSettings, BusSettings, ListenSettings
from corral.kit.process import HOME_DATA, resolve_data
from corral.kit.settings import group, setting, valid_log_level


def _store_url(value: str) -> str | None:
    if value.startswith(("sqlite:///", "postgresql://", "postgres://")):
        return None
    return "must be sqlite:///PATH or postgresql://USER@HOST/NAME"


@dataclass(frozen=True)
class ControllerSettings:
    data: Path = setting(
        "data folder of the controller; root uses /var/lib/corral/controller unless the default exists already",
        default=HOME_DATA / "controller",
    )
    store: str = setting(
        "database: sqlite:///PATH or postgresql://…; empty = corral.db in the data folder",
        default="",
        secret=True,  # a PostgreSQL URL may carry a password
        aliases=("LOCALAI_AUTH_DATABASE_URL",),
        check=lambda value: _store_url(value) if value else None,
    )
    instance_id: str = setting(
        "id of this controller; empty = generated once and kept in the data folder",
        default="",
        aliases=("LOCALAI_INSTANCE_ID",),
    )
    listen: ListenSettings = group(ListenSettings)
    access: AccessSettings = group(AccessSettings)
    bus: BusSettings = group(BusSettings)
    registration: RegistrationSettings = group(RegistrationSettings)
    localai: LocalAISettings = group(LocalAISettings)
    health: HealthSettings = group(HealthSettings)
    runtime: RuntimeSettings = group(RuntimeSettings)
    gallery: GallerySettings = group(GallerySettings)
    models: ModelSettings = group(ModelSettings)
    files: FileSettings = group(FileSettings)
    storage: StorageSettings = group(StorageSettings)
    backends: BackendSettings = group(BackendSettings)
    replicas: ReplicaSettings = group(ReplicaSettings)
    log_level: str = setting("debug, info, warning or error", default="info", check=valid_log_level)
    log_json: bool = setting("log lines as JSON", default=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "data", resolve_data(self.data))

    def store_url(self) -> str:
        return self.store or f"sqlite:///{self.data / 'corral.db'}"
