"""The services that API and page use, by the names of their parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from corral.blobs.upload import Uploads
from corral.contract.receipts import Receipt
from corral.controller.access.join_tokens import JoinTokens
from corral.controller.api.overview import Overview
from corral.controller.backends.catalogue import Catalogue
from corral.controller.backends.galleries import Galleries
from corral.controller.backends.gallery_status import GalleryStatus
from corral.controller.bundles.library import Bundles
from corral.controller.bundles.maker import BundleMaker, BundleService
from corral.controller.bundles.model_files import BundledModels
from corral.controller.files.fetches import Fetches
from corral.controller.files.upload_operations import UploadOperations
from corral.controller.fleetfile.service import FleetFiles
from corral.controller.gateways.demand import Demand
from corral.controller.gateways.receipts import ReceiptService
from corral.controller.gateways.running import RunningRequests
from corral.controller.gateways.view import FleetViews
from corral.controller.install.catalogue_fits import CatalogueFits, SizeLookups
from corral.controller.install.planner import InstallPlanner
from corral.controller.metrics.controller import ControllerMetrics
from corral.controller.metrics.fleet import FleetMetrics
from corral.controller.metrics.replicas import ReplicaMetrics
from corral.controller.metrics.requests import RequestMetrics
from corral.controller.runtime.database import Readiness
from corral.controller.samples.recorder import SampleRecorder
from corral.controller.samples.service import SampleService
from corral.controller.settings import ControllerSettings
from corral.controller.web.routes import dependencies as web_dependencies
from corral.controller.web.settings import EffectiveSettings
from corral.controller.wiring.access import Trust
from corral.controller.wiring.backends import Backends
from corral.controller.wiring.files import OpenedFiles
from corral.controller.wiring.models import ModelParts
from corral.controller.wiring.nodes import NodeParts
from corral.controller.wiring.releases import ReleaseParts
from corral.controller.wiring.replicas import Replicas
from corral.controller.wiring.runtime import Runtime
from corral.controller.wiring.staging import Staging
from corral.kit.settings import describe, origins_of, shown
from corral.store.engine.transactions import Store


def make_bundle_service(
    settings: ControllerSettings,
    store: Store,
    catalogue: Catalogue,
    files: OpenedFiles,
    fetches: Fetches,
    loaded: Bundles,
) -> BundleService:
    models = BundledModels(store, files.files, fetches, files.blobs)
    maker = BundleMaker(store, catalogue, files.artifact_fetches, files.artifact_blobs, models, files.packages)
    uploads = Uploads(loaded.blobs, max_bytes=settings.files.upload_limit_bytes)
    return BundleService(loaded, maker, uploads, (files.blobs, files.artifact_blobs))


def api_services(
    settings: ControllerSettings,
    runtime: Runtime,
    trust: Trust,
    nodes: NodeParts,
    catalogue: Galleries,
    backends: Backends,
    models: ModelParts,
    fetches: Fetches,
    files: OpenedFiles,
    staging: Staging,
    replicas: Replicas,
    lookups: SizeLookups,
    demand: Demand,
    replica_metrics: ReplicaMetrics,
    recorder: SampleRecorder,
    bundles: BundleService,
    running: RunningRequests,
    releases: ReleaseParts,
    upload_operations: UploadOperations,
) -> dict[str, Any]:
    store, bus, clock, issuer = runtime.store, runtime.bus, runtime.clock, runtime.bus_setup.issuer
    gallery_status = GalleryStatus({"backends": catalogue.library, "models": models.library})
    overview = Overview(
        store,
        bus,
        issuer,
        trust.revocations,
        nodes.health,
        live_for_s=settings.runtime.lease_ttl_s,
        compat_localai=settings.localai.compat_localai,
        more=lambda: [*models.notices(), *gallery_status.notices()],
    )
    request_metrics = RequestMetrics(store, clock)

    async def on_receipts(stored: Sequence[Receipt]) -> None:
        await request_metrics.on_receipts(stored)
        await recorder.on_receipts(stored)

    return {
        "access": trust.access,
        "join_tokens": JoinTokens(
            store,
            runtime.feed,
            public_url=settings.listen.public_url,
            trust=trust.gateways,
            install_command=files.packages.install_command,
        ),
        "packages": files.packages,
        "ingress_tokens": trust.ingress_tokens,
        "node_api": nodes.api,
        "blob_peers": files.peers,
        "nodes": nodes.admin,
        "ingresses": trust.ingresses,
        "feed": runtime.feed,
        "views": FleetViews(store, issuer, trust.ingress_tokens, clock),
        "overview": overview,
        "operations": backends.operations,
        "rollouts": backends.rollouts,
        "installed": backends.installed,
        "integrity": backends.integrity,
        "upgrades": backends.upgrades,
        "catalogue": catalogue,
        "gallery_status": gallery_status,
        "preparing": backends.resolver,
        "models": models.models,
        "fetches": fetches,
        "artifacts": files.artifacts,
        "planner": InstallPlanner(files.session, files.hub, replicas.why),
        "fits": CatalogueFits(replicas.why, lookups),
        "uploads": files.uploads,
        "upload_operations": upload_operations,
        "bundles": bundles,
        "releases": releases.releases,
        "stages": staging.stages,
        "locations": staging.locations,
        "cleanup": staging.cleanup,
        "loads": replicas.loads,
        "trials": replicas.trials,
        "replica_rows": replicas.rows,
        "explaining": replicas.why,  # not `why`: the login form has a parameter of that name
        "schedules": models.schedules,
        "fleet_files": FleetFiles(store, models.models, models.schedules, backends.operations, nodes.admin),
        "receipts": ReceiptService(store, clock, demand, on_receipts),
        "running": running,
        "samples": SampleService(store, clock),
        "readiness": Readiness(store),
        "controller_metrics": ControllerMetrics(
            store,
            bus,
            nodes.heartbeats,
            nodes.health,
            request_metrics,
            replica_metrics,
            FleetMetrics(replicas.activity.find, demand.waiting),
        ),
        "effective_settings": EffectiveSettings(describe(ControllerSettings), shown(settings), origins_of(settings)),
        **web_dependencies(clock),
    }
