"""Assembles the bundles: those that are loaded, and the plans of new ones."""

from __future__ import annotations

from corral.blobs.upload import Uploads
from corral.controller.backends.catalogue import Catalogue
from corral.controller.bundles.library import Bundles
from corral.controller.bundles.maker import BundleMaker
from corral.controller.bundles.model_files import BundledModels
from corral.controller.bundles.service import BundleService
from corral.controller.files.fetches import Fetches
from corral.controller.settings import ControllerSettings
from corral.controller.wiring.files import OpenedFiles
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
