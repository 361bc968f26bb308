"""Assembles the parts that stage, list and remove model files on nodes."""

from __future__ import annotations

from corral.controller.files.fetches import Fetches
from corral.controller.files.model_files import ModelFiles
from corral.controller.operations.progress import ProgressCollector
from corral.controller.replicas.reconcile import LEASE as REPLICAS
from corral.controller.settings.backends import BackendSettings
from corral.controller.staging.calls import StageCalls
from corral.controller.staging.cleanup import FleetCleanup
from corral.controller.staging.locations import FileLocations
from corral.controller.staging.stages import Stages
from corral.controller.wiring.runtime import Runtime


class Staging:
    def __init__(
        self,
        runtime: Runtime,
        files: ModelFiles,
        fetches: Fetches,
        progress: ProgressCollector,
        settings: BackendSettings,
    ) -> None:
        store, clock = runtime.store, runtime.clock
        calls = StageCalls(runtime.bus, clock, settings, keep_list=files.keep_list)
        self.stages = Stages(
            store,
            runtime.bus,
            fetches,
            calls,
            progress,
            runtime.leadership,
            runtime.feed,
            clock,
            settings,
            lease=REPLICAS,
        )
        self.locations = FileLocations(store, files, calls)
        self.cleanup = FleetCleanup(store, files, calls)
