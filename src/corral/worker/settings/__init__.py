"""Every setting of `corral worker` and `corral join`, one group for each part of the worker.

The `LOCALAI_*` names of the contract are aliases: the environment of a LocalAI worker starts one of ours.
"""

from __future__ import annotations

from dataclasses import dataclass

from corral.blobs.storage_settings import StorageSettings
from corral.kit.settings import group, setting, valid_log_level
from corral.kit.tracing.settings import TraceSettings
from corral.worker.settings.install import InstallSettings
from corral.worker.settings.network import BusSettings, IngressSettings, LocalAISettings
from corral.worker.settings.node import (
    HeartbeatSettings,
    NodeSettings,
    RegistrationSettings,
    ShutdownSettings,
    UpgradeSettings,
)
from corral.worker.settings.processes import ProcessSettings


@dataclass(frozen=True)
class WorkerSettings:
    node: NodeSettings = group(NodeSettings)
    ingress: IngressSettings = group(IngressSettings)
    heartbeat: HeartbeatSettings = group(HeartbeatSettings)
    registration: RegistrationSettings = group(RegistrationSettings)
    shutdown: ShutdownSettings = group(ShutdownSettings)
    localai: LocalAISettings = group(LocalAISettings)
    storage: StorageSettings = group(StorageSettings)
    bus: BusSettings = group(BusSettings)
    log_level: str = setting("debug, info, warning or error", default="info", check=valid_log_level)
    log_json: bool = setting("log lines as JSON", default=False)
    traces: TraceSettings = group(TraceSettings)
    processes: ProcessSettings = group(ProcessSettings)
    install: InstallSettings = group(InstallSettings)
    upgrade: UpgradeSettings = group(UpgradeSettings)
