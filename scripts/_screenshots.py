"""Draws the pictures of the documents: a small fleet with a day of traffic, in a real Chromium, into docs/images.

.venv/bin/python scripts/_screenshots.py
"""

from __future__ import annotations

import asyncio
import math
import sys
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from corral.contract.catalogue import InstallModel  # noqa: E402
from corral.contract.hardware import Device  # noqa: E402
from corral.contract.messages.replicas import ReplicaDevice  # noqa: E402
from corral.controller.samples.series import Tally, begin_of, bucket_of  # noqa: E402
from corral.store.records import ReplicaStage  # noqa: E402
from corral.store.tables import models, receipts, replicas, samples  # noqa: E402
from corral.store.tables.samples import Sample  # noqa: E402
from tests.integration.store.rows import a_receipt, a_replica, row_of  # noqa: E402
from tests.support.chromium import chromium, new_person, open_signed_in  # noqa: E402
from tests.support.model_catalogue import models_of  # noqa: E402
from tests.support.page import GIB, PageApp, made_node, open_page_app, served  # noqa: E402
from tests.support.processes import free_port  # noqa: E402

PAGES = {"overview": "/", "node": "/nodes/barn", "model": "/models/qwen3-14b"}
WINDOW = {"width": 1280, "height": 1000}


def gpu(index: int, free_gib: int) -> Device:
    return Device(
        index=index, vendor="nvidia", name="GeForce RTX 4090", total_bytes=24 * GIB, free_bytes=free_gib * GIB,
        temperature_c=58, power_w=210, utilisation=0.6,
    )  # fmt: skip


async def fill(corral: PageApp) -> None:
    barn = made_node("barn", devices=(gpu(0, 4), gpu(1, 9)), total_vram=48 * GIB, available_vram=13 * GIB)
    loft, shed = made_node("loft", devices=(gpu(0, 12),)), made_node("shed", devices=(), total_vram=0, gpu_vendor="")
    await corral.put(barn, loft, shed, labels={"tier": "fast"})
    await corral.put(made_node("attic", "pending"))
    catalogue = models_of(corral.store, corral.feed)
    for name in ("qwen3-14b", "smollm", "bge-m3", "whisper-large"):
        definition = {"name": name, "backend": "llama-cpp", "parameters": {"model": f"{name}.gguf"}}
        await catalogue.install(InstallModel(definition=definition))
    now = datetime.now(UTC)
    where = [
        (barn.id, "qwen3-14b", (0,), 14, ReplicaStage.RUNNING),
        (barn.id, "smollm", (0,), 4, ReplicaStage.RUNNING),
        (barn.id, "whisper-large", (1,), 15, ReplicaStage.RUNNING),
        (loft.id, "qwen3-14b", (0,), 14, ReplicaStage.ORDERED),
        (shed.id, "bge-m3", (), 6, ReplicaStage.RUNNING),
    ]
    async with corral.store.write() as tx:
        known = {model.id: model.revision for model in await models.list_(tx)}
        rows = [
            a_replica(
                node, model, stage=stage, revision=known[model], op_id=f"{model} {node}", memory_bytes=gib * GIB,
                devices=tuple(ReplicaDevice("nvidia", index) for index in on), created_at=now, ready_at=now,
            )
            for node, model, on, gib, stage in where
        ]  # fmt: skip
        await replicas.put(tx, rows)
        served_by = [("smollm", barn.id), ("qwen3-14b", barn.id), ("bge-m3", shed.id)]
        told = [
            a_receipt(
                at=now - timedelta(seconds=4 + 7 * place), model=served_by[place % 3][0],
                node_id=served_by[place % 3][1], first_byte_us=180_000 + 9_000 * place, total_us=2_300_000,
                prompt_tokens=312, completion_tokens=180 + place, status=503 if place == 4 else 200,
            )
            for place in range(10)
        ]  # fmt: skip
        await receipts.insert(tx, [row_of(receipt) for receipt in told])
        for kind, name in (("fleet", ""), ("model", "qwen3-14b"), ("node", barn.id)):
            await samples.put(tx, list(an_hour(kind, name, now)))


def an_hour(kind: str, name: str, now: datetime) -> Iterator[Sample]:
    """Traffic that rises and falls."""
    for minute in range(65):
        at, tally = begin_of(now, 60) - timedelta(minutes=minute), Tally()
        load = 2.2 + math.sin(minute / 9) + 0.5 * math.sin(minute / 2.3)
        if kind == "node":
            readings = {"ram": 64, "ram_used": 22 + load, "device": 48, "device_used": 30 + 2 * load}
            for gauge, gib in readings.items():
                tally.measure(gauge, gib * GIB)
            tally.measure("temperature", 50 + 4 * load)
            tally.measure("power", 180 + 60 * load)
        else:
            tally.requests = int(min(60.0, (now - at).total_seconds()) * load)
            tally.errors = int(max(0.0, load - 3.2) * 8)
            tally.prompt_tokens, tally.completion_tokens = 420 * tally.requests, 180 * tally.requests
            for share in range(20):
                tally.first_token[bucket_of(120 + 18 * share * load)] += 1
            tally.measure("waiting", max(0.0, load - 2.6))
            tally.measure("waiting", max(0.0, 2 * load - 4.6))
        tally.measure("in_flight", load * 1.6)
        yield Sample(kind, name, 60, at=at, source="picture", body=tally.body(min(60, (now - at).total_seconds())))


async def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        async with (
            open_page_app(Path(folder)) as corral,
            served(corral, free_port()) as url,
            chromium() as browser,
            new_person(browser, viewport=WINDOW, device_scale_factor=1) as person,
        ):
            await fill(corral)
            page = await open_signed_in(person, url, "/", await corral.key(name="viewer", role="viewer"))
            for name, path in PAGES.items():
                await page.goto(f"{url}{path}")
                await page.locator(".chart .line").first.wait_for(state="attached")
                await page.screenshot(path=ROOT / "docs" / "images" / f"{name}.png", animations="disabled")
            await person.assert_clean()


if __name__ == "__main__":
    asyncio.run(main())
