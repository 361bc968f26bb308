"""Uploads a bundle to the controller, after all of it was verified on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from corral.cli.bundle.archive import BundleArchive, name_of, verify
from corral.cli.common.transfer_bar import transfer_bar
from corral.cli.models.upload import send_file
from corral.contract.installs import LocalFile
from corral.kit.errors import Failed
from corral.kit.threads import run_in_thread

if TYPE_CHECKING:
    from corral.client import Client
    from corral.contract.bundles import BundleView


async def load_archive(client: Client, archive: BundleArchive) -> BundleView:
    """Nothing is sent of a damaged archive, and the controller uses nothing before all of it is there."""
    total = archive.manifest.size_bytes
    with transfer_bar(f"checking {archive.path.name}", total) as on_checked:
        await run_in_thread(lambda stop: verify(archive, on_checked, stop))
    done = 0
    with transfer_bar(f"uploading {archive.path.name}", total) as on_bytes:
        for blob in archive.manifest.blobs:
            file = LocalFile(name_of(blob), blob.size_bytes, blob.digest.removeprefix("sha256:"))
            before = done

            def on_sent(size: int, before: int = before) -> None:
                on_bytes(before + size)

            await send_file(client.bundles.uploads, archive.path, file, on_sent, start=archive.offsets[blob.digest])
            done += blob.size_bytes
    view = await client.bundles.load(archive.document)
    if view.digest != archive.digest:
        raise Failed(f"the controller loaded {view.digest}, and the archive is {archive.digest}")
    return view
