"""Every page under axe-core, in light, dark and on a phone: nothing that it calls serious or critical."""

from __future__ import annotations

import base64
import hashlib
import shutil
import subprocess
import tarfile
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, expect

from corral.contract.catalogue import InstallModel
from corral.store.records import ReplicaStage
from corral.store.tables import models, receipts, replicas
from tests.integration.store.rows import a_receipt, a_replica, row_of
from tests.support.chromium import new_person, open_signed_in
from tests.support.model_catalogue import models_of
from tests.support.page import GIB, PageApp, made_node, open_page_app, served
from tests.support.processes import free_port

AXE = "axe-core@4.10.2"
AXE_SHA512 = "RE3mdQ7P3FRSe7eqCWoeQ/Z9QXrtniSjp1wUjt5nRC3WIpz5rSCve6o3fsZ2aCpJtrZjSZgjwXAoTO5k4tEI0w=="
FETCH_S = 60.0
MODEL = "org/smollm"
PAGES = (
    "/",
    "/nodes",
    "/nodes/barn",
    "/fleet/models",
    f"/models/{MODEL}",
    "/playground",
    "/fleet/backends",
    "/fleet/backends/catalogue",
    "/fleet/requests",
    "/fleet/operations",
    "/fleet/logs",
    "/fleet/logs?node=barn&worker=true",
    "/models/gone",
    "/fleet/keys",
    "/fleet/settings",
    "/search?q=smol",
    "/docs",
)
FORMS: dict[str, dict[str, Any]] = {
    "light": {"viewport": {"width": 1280, "height": 900}},
    "dark": {"viewport": {"width": 1280, "height": 900}, "color_scheme": "dark"},
    "phone": {"viewport": {"width": 390, "height": 844}},
}
RUNNING = {
    "gateway": "g",
    "total": 9,
    "requests": [
        {"id": "r1", "at": 1.0, "key_id": "k", "model": MODEL, "path": "/v1/chat/completions"},
        {
            "id": "r2",
            "at": 2.0,
            "key_id": "k",
            "model": MODEL,
            "path": "/v1/chat/completions",
            "node_id": "n",
            "tokens": 7,
        },
    ],
}
FAULTS = """
async () => (await axe.run(document, {resultTypes: ["violations"]})).violations
  .filter(({impact}) => impact === "serious" || impact === "critical")
  .map(({id, help, nodes}) => `${id}: ${help}: ${nodes.slice(0, 3).map(({html}) => html.slice(0, 160)).join(" | ")}`)
"""

pytestmark = [
    pytest.mark.browser,
    pytest.mark.long,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(300),  # axe reads every element of some 45 pages
]


@pytest.fixture(scope="module")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The script of the pinned version, from the package registry that npm is set up for."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("needs npm, which fetches axe-core")
    folder = tmp_path_factory.mktemp("axe")
    try:
        packed = subprocess.run(
            [npm, "pack", "--silent", AXE], cwd=folder, capture_output=True, text=True, timeout=FETCH_S
        )
    except subprocess.TimeoutExpired:
        pytest.skip(f"npm did not fetch {AXE} within {FETCH_S:g} s")
    archives = list(folder.glob("*.tgz"))
    if packed.returncode or not archives:
        pytest.skip(f"npm cannot fetch {AXE}: {packed.stderr.strip()[-300:]}")
    content = archives[0].read_bytes()
    assert base64.b64encode(hashlib.sha512(content).digest()).decode() == AXE_SHA512, f"{AXE} is not what was pinned"
    with tarfile.open(archives[0]) as archive:
        member = archive.extractfile("package/axe.min.js")
        assert member is not None
        return member.read().decode()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def corral(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[PageApp]:
    async with open_page_app(tmp_path_factory.mktemp("corral")) as page:
        barn = made_node("barn")
        await page.put(barn, made_node("loft", "draining"), labels={"tier": "fast"})
        await page.put(made_node("attic", "pending"))
        await models_of(page.store, page.feed).install(InstallModel(definition={"name": MODEL, "backend": "llama-cpp"}))
        for _ in range(6):  # more history than its box shows
            await page.nodes.drain("barn")
            await page.nodes.resume("barn")
        now = datetime.now(UTC)
        async with page.store.write() as tx:
            revision = (await models.get(tx, MODEL)).revision
            row = a_replica(barn.id, MODEL, stage=ReplicaStage.RUNNING, revision=revision, memory_bytes=4 * GIB)
            await replicas.put(tx, [row])
            told = [a_receipt(at=now, model=MODEL, node_id=barn.id, status=status) for status in (200, 503)]
            await receipts.insert(tx, [row_of(receipt) for receipt in told])
        yield page


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def url(corral: PageApp) -> AsyncIterator[str]:
    async with served(corral, free_port()) as url:
        yield url


@pytest.mark.parametrize("form", FORMS)
async def test_no_page_has_a_serious_fault(browser: Browser, corral: PageApp, url: str, axe: str, form: str) -> None:
    async with new_person(browser, **FORMS[form]) as person:
        await person.context.add_init_script(script=axe)
        sign_in = await person.tab()
        await sign_in.goto(f"{url}/login")
        found = {"/login": await faults_of(sign_in)}
        page = await open_signed_in(person, url, "/", await corral.key(name=form))
        gateway = {"authorization": f"Bearer {await corral.key('gateway')}"}
        for path in PAGES:
            await page.request.post(f"{url}/internal/running", data=RUNNING, headers=gateway)
            await page.goto(f"{url}{path}")
            await expect(page.locator("h1, h2").first).to_be_visible()
            found[path] = await faults_of(page)
            width = await page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
            if width > 0:
                found[path].append(f"scrolls sideways by {width} px")
        assert not {path: faults for path, faults in found.items() if faults}


async def faults_of(page: Page) -> list[str]:
    return [str(fault) for fault in await page.evaluate(FAULTS)]
