"""Assembles the parts that upgrade Corral itself."""

from __future__ import annotations

from corral.controller.operations.service import Operations
from corral.controller.releases.calls import ReleaseCalls
from corral.controller.releases.service import Releases
from corral.controller.releases.upgrades import CorralUpgrades
from corral.controller.replicas.reconcile import LEASE as REPLICAS
from corral.controller.settings import ControllerSettings
from corral.controller.wiring.access import Trust
from corral.controller.wiring.files import OpenedFiles
from corral.controller.wiring.runtime import Runtime


class ReleaseParts:
    def __init__(
        self,
        settings: ControllerSettings,
        runtime: Runtime,
        trust: Trust,
        files: OpenedFiles,
        operations: Operations,
    ) -> None:
        calls = ReleaseCalls(runtime.bus, timeout_s=settings.backends.backend_accept_timeout_s)
        self.releases = Releases(
            runtime.store,
            trust.release_keys,
            calls,
            runtime.feed,
            files.blobs,
            files.packages.own,
            lambda node, selector: operations.scope(node=node, selector=selector),
            live_for_s=settings.runtime.lease_ttl_s,
        )
        self.upgrades = CorralUpgrades(
            runtime.store,
            trust.release_keys,
            calls,
            files.packages,
            files.artifact_blobs,
            files.files,
            runtime.leadership,
            runtime.feed,
            runtime.clock,
            settings.backends,
            lease=REPLICAS,
        )
