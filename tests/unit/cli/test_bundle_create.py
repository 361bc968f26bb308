"""Writing a bundle while the connection breaks, blobs are removed, and bytes are wrong."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from corral.cli.bundle import create
from corral.cli.bundle.archive import open_archive, verify
from corral.cli.bundle.create import BundleDownload
from corral.contract.bundles import (
    FORMAT,
    BundledBlob,
    BundledFile,
    BundledModel,
    BundleManifest,
    BundlePlan,
    PlanBundle,
    digest_of_bundle,
    write_manifest,
)
from corral.kit.errors import Failed, NotFound, Unreachable
from corral.kit.retry import Backoff
from corral.kit.threads import StopToken

CONTENT = bytes(range(256)) * 20
SHA256 = hashlib.sha256(CONTENT).hexdigest()
MANIFEST = BundleManifest(
    FORMAT,
    "1",
    (),
    (BundledModel("m", "", {"name": "m"}, (BundledFile("w", "u", "u", f"sha256:{SHA256}", len(CONTENT)),)),),
    (),
    (BundledBlob(f"sha256:{SHA256}", len(CONTENT)),),
)
DOCUMENT = write_manifest(MANIFEST)
READY = BundlePlan(ready=True, document=DOCUMENT.decode(), digest=digest_of_bundle(DOCUMENT), size_bytes=len(CONTENT))


class ScriptedBundles:
    """The controller's side: plans in order, the last one for ever, and downloads that go wrong as scripted."""

    def __init__(self, *plans: BundlePlan, faults: tuple[Any, ...] = (), content: bytes = CONTENT) -> None:
        self.plans = list(plans) or [READY]
        self.faults = list(faults)
        self.content = content
        self.offsets: list[int] = []

    async def plan(self, _request: PlanBundle) -> BundlePlan:
        return self.plans.pop(0) if len(self.plans) > 1 else self.plans[0]

    async def download(self, sha256: str, offset: int = 0) -> AsyncGenerator[bytes, None]:
        assert sha256 == SHA256
        self.offsets.append(offset)
        fault = self.faults.pop(0) if self.faults else None
        if isinstance(fault, NotFound):
            raise fault
        end = offset + 1000 if fault is not None else len(self.content)
        yield self.content[offset:end]
        if fault is not None:
            raise fault


class ScriptedClient:
    def __init__(self, bundles: ScriptedBundles) -> None:
        self.bundles = bundles


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(create, "ASK_AGAIN_S", 0.0)
    monkeypatch.setattr(create, "Backoff", lambda *_: Backoff(0.001, 0.001))


def names_in(folder: Path) -> list[str]:
    return [each.name for each in folder.iterdir()]


async def write(bundles: ScriptedBundles, path: Path) -> None:
    client: Any = ScriptedClient(bundles)
    download = BundleDownload(client, PlanBundle(), quiet=True)
    plan = await download.wait_until_ready()
    assert isinstance(plan, BundlePlan)
    await download.write(plan, path)


async def test_a_download_continues_after_broken_connections(tmp_path: Path) -> None:
    bundles = ScriptedBundles(faults=(Unreachable("broken"), Unreachable("broken again")))
    await write(bundles, tmp_path / "a.bundle")
    assert bundles.offsets == [0, 1000, 2000]
    await asyncio.to_thread(verify, open_archive(tmp_path / "a.bundle"), lambda _done: None, StopToken())


async def test_a_blob_that_was_removed_is_planned_again(tmp_path: Path) -> None:
    waiting = BundlePlan(ready=False)
    bundles = ScriptedBundles(waiting, READY, waiting, READY, faults=(NotFound("gone"),))
    await write(bundles, tmp_path / "a.bundle")
    assert bundles.offsets == [0, 0]
    assert open_archive(tmp_path / "a.bundle").manifest == MANIFEST


@pytest.mark.parametrize(
    ("bundles", "reason"),
    [
        (ScriptedBundles(content=b"x" * len(CONTENT)), "another hash"),
        (ScriptedBundles(content=CONTENT + b"x"), "larger than the bundle says"),
        (ScriptedBundles(content=b""), "is not complete"),
    ],
)
async def test_wrong_bytes_leave_no_file(bundles: ScriptedBundles, reason: str, tmp_path: Path) -> None:
    (tmp_path / "a.bundle").write_text("an earlier one")
    with pytest.raises(Failed, match=reason):
        await write(bundles, tmp_path / "a.bundle")
    assert (tmp_path / "a.bundle").read_text() == "an earlier one"
    assert names_in(tmp_path) == ["a.bundle"]


async def test_all_problems_are_told(tmp_path: Path) -> None:
    plan = BundlePlan(ready=False, problems=("engine for linux/arm64: no build", "other: 401"))
    with pytest.raises(Failed, match="no build\nother: 401"):
        await write(ScriptedBundles(plan), tmp_path / "a.bundle")


async def test_a_manifest_with_another_hash_is_refused(tmp_path: Path) -> None:
    plan = BundlePlan(ready=True, document=DOCUMENT.decode() + " ", digest=digest_of_bundle(DOCUMENT))
    with pytest.raises(Failed, match="arrived with another hash"):
        await write(ScriptedBundles(plan), tmp_path / "a.bundle")
