"""Uploads a bundle to the controller, after all of it was verified on this machine."""

from __future__ import annotations

import platform
import shlex
from typing import TYPE_CHECKING

from corral.cli.bundle.archive import BundleArchive, name_of, verify
from corral.cli.common.output import transfer_bar
from corral.cli.models.upload import UploadSession, open_upload, send_file
from corral.contract.installs import LocalFile, OpenUpload
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
    upload = UploadSession(client.bundles.uploads, _request(archive))
    await open_upload(upload, archive.path)
    done = 0
    with transfer_bar(f"uploading {archive.path.name}", total) as on_bytes:
        for blob, file in zip(archive.manifest.blobs, _files(archive), strict=True):
            before = done

            def on_sent(size: int, before: int = before) -> None:
                on_bytes(before + size)

            await send_file(upload, archive.path, file, on_sent, start=archive.offsets[blob.digest])
            done += blob.size_bytes
    view = await client.bundles.load(archive.document, operation=upload.id)
    if view.digest != archive.digest:
        raise Failed(f"the controller loaded {view.digest}, and the archive is {archive.digest}")
    return view


def _request(archive: BundleArchive) -> OpenUpload:
    command = shlex.join(["corral", "bundle", "load", str(archive.path)])
    return OpenUpload(archive.path.name, _files(archive), archive.digest, command=command, host=platform.node())


def _files(archive: BundleArchive) -> tuple[LocalFile, ...]:
    return tuple(
        LocalFile(name_of(blob), blob.size_bytes, blob.digest.removeprefix("sha256:"))
        for blob in archive.manifest.blobs
    )
