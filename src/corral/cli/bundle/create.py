"""Writes the archive of a new bundle: waits until the controller has all of its blobs, and downloads them."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from corral.cli.bundle.archive import END, head_of, manifest_name, name_of, padding_of
from corral.cli.common.output import OnBytes, print_note, printable, transfer_bar
from corral.cli.operations import watch
from corral.contract.bundles import BundledBlob, BundlePlan, PlanBundle, digest_of_bundle, read_manifest
from corral.kit.errors import Failed, NotFound, OutcomeUnknown, Unavailable, Unreachable
from corral.kit.retry import Backoff

if TYPE_CHECKING:
    from corral.client import Client

ASK_AGAIN_S = 1.0
RENEW_S = 20.0  # between two plans during the download: the controller keeps what somebody is interested in
MAX_TRIES = 8  # without a new byte in between
MAX_FETCHES = 3  # operations for the files of one plan
_PASSING = (Unreachable, Unavailable, OutcomeUnknown)


class BundleDownload:
    def __init__(self, client: Client, request: PlanBundle, *, quiet: bool) -> None:
        self._client = client
        self._request = request
        self._quiet = quiet
        self._planned_at = 0.0

    async def wait_until_ready(self) -> BundlePlan | int:
        """The plan, or the exit code of an operation that failed or was left. Raises Failed with all problems."""
        fetches = 0
        plan = await self._plan()
        while not plan.ready:
            if plan.problems:
                raise Failed("\n".join(plan.problems))
            if plan.jobs:
                fetches += 1
                if fetches > MAX_FETCHES:
                    raise Failed("the files of the models are not on this controller: create the bundle on the other")
                if code := await self._follow(plan.jobs):
                    return code
            else:
                plan = await self._wait_for_downloads(plan)
                continue
            plan = await self._plan()
        if digest_of_bundle(plan.document.encode()) != plan.digest:
            raise Failed("the manifest of the bundle arrived with another hash: run the command again")
        return plan

    async def write(self, plan: BundlePlan, path: Path) -> None:
        """Into a file beside `path`, which gets its name when it is complete and verified."""
        aside = path.with_name(f".{path.name}.part")
        try:
            with aside.open("wb") as file, transfer_bar(f"writing {path.name}", plan.size_bytes) as on_bytes:
                await self._write(plan, file, on_bytes)
                file.flush()
                os.fsync(file.fileno())
            os.replace(aside, path)
        except OSError as error:
            raise Failed(f"{path} cannot be written: {error.strerror}") from error
        finally:
            with contextlib.suppress(OSError):
                aside.unlink(missing_ok=True)

    async def _write(self, plan: BundlePlan, file: BinaryIO, on_bytes: OnBytes) -> None:
        document = plan.document.encode()
        file.write(head_of(manifest_name(document), len(document)) + document + padding_of(len(document)))
        done = 0
        for blob in read_manifest(document).blobs:
            file.write(head_of(name_of(blob), blob.size_bytes))
            await self._write_blob(blob, file, lambda size, before=done: on_bytes(before + size))  # type: ignore[misc]
            file.write(padding_of(blob.size_bytes))
            done += blob.size_bytes
        file.write(END)

    async def _write_blob(self, blob: BundledBlob, file: BinaryIO, on_bytes: OnBytes) -> None:
        """Continues after a broken connection."""
        found, done, backoff = hashlib.sha256(), 0, Backoff(0.2, 5.0)
        while done < blob.size_bytes:
            await self._renew()
            before = done
            try:
                async with aclosing(self._client.bundles.download(blob.digest.removeprefix("sha256:"), done)) as pieces:
                    async for piece in pieces:
                        done += len(piece)
                        if done > blob.size_bytes:
                            raise Failed(f"the blob {blob.digest} is larger than the bundle says")
                        found.update(piece)
                        await asyncio.to_thread(file.write, piece)
                        on_bytes(done)
                if done == before:
                    raise Unreachable("the controller sent nothing")
            except NotFound:  # removed to make room, while another was downloaded
                if backoff.failures >= MAX_TRIES:
                    raise
                await asyncio.sleep(backoff.next_s())
                await self.wait_until_ready()
            except _PASSING as error:
                if done > before:
                    backoff.reset()
                if backoff.failures >= MAX_TRIES:
                    raise Failed(f"{error.message}\nthe bundle is not complete: run the command again") from error
                await asyncio.sleep(backoff.next_s())
        if f"sha256:{found.hexdigest()}" != blob.digest:
            raise Failed(f"the blob {blob.digest} arrived with another hash: run the command again")

    async def _wait_for_downloads(self, plan: BundlePlan) -> BundlePlan:
        """Until there is something else to do."""
        with transfer_bar("the controller fetches", plan.size_bytes) as on_bytes:
            while not (plan.ready or plan.problems or plan.jobs):
                on_bytes(plan.have_bytes)
                await asyncio.sleep(ASK_AGAIN_S)
                plan = await self._plan()
        return plan

    async def _follow(self, jobs: tuple[str, ...]) -> int:
        if self._quiet:
            return await watch.wait_silently(self._client, jobs)
        return await watch.follow_or_detach(self._client, jobs, detach=False, as_json=False)

    async def _renew(self) -> None:
        if asyncio.get_running_loop().time() - self._planned_at > RENEW_S:
            with contextlib.suppress(*_PASSING):
                await self._plan()

    async def _plan(self) -> BundlePlan:
        self._planned_at = asyncio.get_running_loop().time()
        return await self._client.bundles.plan(self._request)


def print_notes(plan: BundlePlan) -> None:
    for note in plan.notes:
        print_note(printable(note))
