"""From the settings to what the parts that load models are told."""

from __future__ import annotations

from datetime import timedelta

from corral.controller.replicas.lifecycle import Times
from corral.controller.replicas.load_jobs import Cooldown
from corral.controller.replicas.reconcile import Pace, ReplicaOptions
from corral.controller.scheduler.world import Policy
from corral.controller.settings import ControllerSettings
from corral.controller.wiring.replicas import ReplicaSettings, ReplicaTimes


def replica_settings(settings: ControllerSettings) -> ReplicaSettings:
    cooldown_s = settings.replicas.load_cooldown_s
    return ReplicaSettings(
        ReplicaOptions(
            pace=Pace(every_s=settings.replicas.replica_interval_s),
            times=Times(orphan=timedelta(seconds=settings.replicas.stray_after_s)),
            cooldown=Cooldown(first=timedelta(seconds=cooldown_s), longest=timedelta(seconds=max(300.0, cooldown_s))),
            policy=Policy(
                disk_check=settings.replicas.disk_check,
                exclusive_groups=settings.replicas.exclusive_groups,
                shared_models=settings.replicas.shared_models,
                up_after_s=settings.replicas.scale_up_after_s,
                down_after_s=settings.replicas.scale_down_after_s,
            ),
            idle_unload_s=settings.replicas.idle_unload_s,
            localai=settings.localai.compat_localai,
        ),
        ReplicaTimes(accept_s=settings.backends.backend_accept_timeout_s),
    )
