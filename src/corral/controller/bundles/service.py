"""What the API needs of bundles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from corral.blobs.eviction import note_request
from corral.blobs.store import Blob, BlobStore
from corral.blobs.upload import Uploads
from corral.controller.bundles.library import Bundles
from corral.controller.bundles.maker import BundleMaker


@dataclass(frozen=True)
class BundleService:
    loaded: Bundles
    maker: BundleMaker
    uploads: Uploads
    stores: Sequence[BlobStore]  # that planned bundles take their blobs from

    def find_blob(self, digest: str) -> Blob | None:
        """A blob for a new bundle; it counts as requested now, so that it is not removed at once."""
        for store in self.stores:
            blob = store.find(digest)
            if blob is not None and note_request(blob):
                return blob
        return None
