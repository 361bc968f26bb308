"""Models and requests in a real browser, on a controller that really places and loads; the workers are scripted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Locator, Page, expect

from corral.contract.receipts import Receipt, Receipts
from corral.controller.gateways.receipts import ReceiptService
from tests.support.chromium import Watched, new_person, open_signed_in
from tests.support.page import PageApp, open_model_page, served
from tests.support.processes import free_port
from tests.support.replica_fleet import ReplicaFleet

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="module")]

NASTY = "<img src=x onerror=alert(1)>"


@dataclass
class Corral:
    app: PageApp
    fleet: ReplicaFleet
    url: str

    async def open(self, person: Watched, path: str = "/fleet/models", role: str = "admin") -> Page:
        return await open_signed_in(person, self.url, path, await self.app.key(role))


@pytest_asyncio.fixture(loop_scope="module")
async def corral(tmp_path: Path) -> AsyncIterator[Corral]:
    async with open_model_page(tmp_path) as (app, fleet), served(app, free_port()) as url:
        yield Corral(app, fleet, url)
        app.feed.end()  # open streams must not hold the server up


@pytest_asyncio.fixture(loop_scope="module")
async def person(browser: Browser, corral: Corral) -> AsyncIterator[Watched]:
    async with new_person(browser) as person:
        yield person
        await person.assert_clean()


def model_of(page: Page, name: str) -> Locator:
    return page.get_by_role("article", name=name, exact=True)


def pill_of(page: Page, name: str) -> Locator:
    return model_of(page, name).locator(".model-head .pill")


async def choose(page: Page, model: str, act: str) -> None:
    await page.get_by_role("button", name=f"Actions for {model}", exact=True).click()
    await page.locator("#menu").get_by_role("button", name=act).click()


async def test_a_model_is_installed_loaded_changed_and_deleted(person: Watched, corral: Corral) -> None:
    barn = await corral.fleet.worker("barn")
    barn.starts.hold = asyncio.Event()
    page = await corral.open(person)
    await expect(page.get_by_text("No model yet.")).to_be_visible()
    await page.get_by_role("button", name="Install a model").click()
    await page.get_by_label("From the galleries").fill("smollm2")
    await page.get_by_role("button", name="Install smollm2-135m", exact=True).click()
    await expect(page.locator("#said")).to_contain_text("smollm2-135m installed.")
    await expect(pill_of(page, "smollm2-135m")).to_have_text("not loaded")
    await expect(page.locator("#found")).to_contain_text("installed")
    await page.get_by_role("button", name="Close").click()

    await page.get_by_role("button", name="Load smollm2-135m").click()
    await expect(pill_of(page, "smollm2-135m")).to_have_text("loading")
    replicas = page.get_by_role("list", name="Replicas of smollm2-135m").get_by_role("listitem")
    await expect(replicas).to_contain_text(["barn"])
    barn.starts.hold.set()
    await expect(pill_of(page, "smollm2-135m")).to_have_text("ready × 1")
    await expect(replicas).to_contain_text(["idle"])

    await page.get_by_role("button", name="Why? smollm2-135m").click()
    why = page.get_by_role("dialog", name="Where smollm2-135m goes, and why")
    await why.locator("summary", has_text="barn").click()
    await expect(why.get_by_role("row", name="slots")).to_contain_text("runs 1 of at most 1 replicas of this model")
    await page.keyboard.press("Escape")
    await expect(why).to_be_hidden()

    await choose(page, "smollm2-135m", "Replicas…")
    scale = page.get_by_role("dialog", name="Replicas of smollm2-135m")
    await scale.get_by_label("At least so many replicas").fill("2")
    await scale.get_by_label("Labels of the nodes").fill("tier")
    await scale.get_by_role("button", name="Save").click()
    await expect(scale.get_by_role("alert")).to_contain_text("write labels as key=value")
    await scale.get_by_label("Labels of the nodes").fill("")
    await scale.get_by_role("button", name="Save").click()
    await expect(pill_of(page, "smollm2-135m")).to_have_text("ready × 1 of 2")

    await choose(page, "smollm2-135m", "Edit…")
    edit = page.get_by_role("dialog", name="Edit smollm2-135m")
    text = edit.get_by_label("Its definition, as YAML")
    await expect(text).to_be_focused()
    written = await text.input_value()
    assert written.startswith("name: smollm2-135m\n")
    await text.fill(f"{written}threads: [\n")
    await edit.get_by_role("button", name="Save").click()
    await expect(edit.get_by_role("alert")).to_contain_text("YAML")
    await text.fill(f"{written}threads: 3\n")
    await edit.get_by_role("button", name="Save").click()
    await expect(page.locator("#said")).to_contain_text("smollm2-135m edited.")
    await choose(page, "smollm2-135m", "Unload…")
    await page.get_by_role("button", name="Unload", exact=True).click()
    await expect(page.locator("#said")).to_contain_text("requires replicas: change its schedule first")

    await choose(page, "smollm2-135m", "Delete…")
    await page.get_by_role("dialog", name="Delete smollm2-135m?").get_by_role("button", name="Delete").click()
    await expect(page.get_by_text("No model yet.")).to_be_visible()
    await corral.fleet.until_gone("smollm2-135m")
    assert await page.evaluate("window.sameDocument")


async def test_a_viewer_reads_everything_and_changes_nothing(person: Watched, corral: Corral) -> None:
    barn = await corral.fleet.worker("barn", has="llama-cpp")
    barn.starts.failures = [f"exit 1: {NASTY}"] * 3
    await corral.fleet.define("org/m", description=NASTY)
    await corral.fleet.ask("org/m")
    page = await corral.open(person, role="viewer")
    await expect(pill_of(page, "org/m")).to_have_text("failed")
    await expect(model_of(page, "org/m").locator(".cause")).to_contain_text(f"exit 1: {NASTY}")
    await expect(page.locator("main button:visible")).to_have_text(
        ["Use org/m", "Why? org/m", "Files of org/m", "Definition of org/m"]
    )
    await page.get_by_role("button", name="Use org/m").click()
    use = page.get_by_role("dialog", name="Ask org/m")
    await expect(use).to_contain_text('corral chat org/m "What is a corral?"')
    await expect(use).to_contain_text(f'OpenAI(base_url="{corral.url}/v1"')
    await use.get_by_role("button", name="Close").click()
    await page.get_by_role("button", name="Definition of org/m").click()
    dialog = page.get_by_role("dialog", name="Definition of org/m")
    await expect(dialog.get_by_label("Its definition, as YAML")).to_have_attribute("readonly", "")
    assert "backend: llama-cpp" in await dialog.get_by_label("Its definition, as YAML").input_value()
    await dialog.get_by_role("button", name="Close").click()
    await page.get_by_role("button", name="Why? org/m").click()
    await expect(page.get_by_role("dialog")).to_contain_text("its last start here failed")
    assert await page.locator("img[src=x]").count() == 0


async def _tell(corral: Corral, *receipts: dict[str, Any]) -> None:
    now = datetime.now(UTC).timestamp()
    usual: dict[str, Any] = {"at": now, "key_id": "k-1", "model": "m", "path": "/v1/chat/completions", "status": 200}
    told = tuple(Receipt(**(usual | {"id": f"r-{number}"} | each)) for number, each in enumerate(receipts))
    await ReceiptService(corral.app.store, corral.fleet.fleet.clock).take(Receipts(receipts=told))


@pytest.mark.long
async def test_requests_are_listed_as_they_come_and_sifted(person: Watched, corral: Corral) -> None:
    page = await corral.open(person, "/fleet/requests", "viewer")
    await expect(page.get_by_text("No request yet.")).to_be_visible()
    await _tell(corral, {"model": "m", "total_ms": 990.0}, {"model": NASTY, "status": 503, "ending": "client_left"})
    rows = page.locator("#receipts tbody tr")
    await expect(rows).to_have_count(2)
    await expect(page.get_by_role("row", name="m /v1/chat/completions").first).to_contain_text("990 ms")
    await page.get_by_role("link", name="failed").click()
    await expect(rows).to_have_count(1)
    await expect(rows).to_contain_text([NASTY])
    await page.goto(f"{corral.url}/fleet/requests?model=m")
    await expect(rows).to_have_count(1)
    await page.get_by_role("link", name="for m").click()
    await expect(rows).to_have_count(2)


@pytest.mark.long
async def test_many_models_are_found_and_shown_in_pieces(person: Watched, corral: Corral) -> None:
    for number in range(120):
        await corral.fleet.define(f"model-{number:03}")
    page = await corral.open(person)
    await expect(page.locator(".model")).to_have_count(50)
    await page.get_by_role("link", name="next →").click()
    await expect(page.locator(".pager")).to_contain_text("Models 51–100 of 120")
    await page.get_by_label("Find models").fill("07")
    await expect(page.locator(".model h2")).to_have_text(
        ["model-007", *(f"model-07{n}" for n in range(10)), "model-107"]
    )
    await expect(page).to_have_url(f"{corral.url}/fleet/models?find=07")
    await page.reload()
    await expect(page.locator(".model")).to_have_count(12)


@pytest.mark.long
async def test_changes_are_not_lost_by_a_slip_nor_those_of_somebody_else(person: Watched, corral: Corral) -> None:
    await corral.fleet.define("m")
    await corral.fleet.define("n", alias="m", backend="")
    page = await corral.open(person)
    await choose(page, "m", "Edit…")
    edit = page.get_by_role("dialog", name="Edit m")
    await edit.get_by_label("Its definition, as YAML").fill("name: m\nbackend: llama-cpp\ncontext_size: 8\n")
    await page.keyboard.press("Escape")
    await page.get_by_role("dialog", name="Discard your changes?").get_by_role("button", name="Cancel").click()
    await expect(edit).to_be_visible()
    await corral.fleet.define("m", context_size=16)
    await edit.get_by_role("button", name="Save").click()
    await expect(edit.get_by_role("alert")).to_contain_text("was changed meanwhile")
    await page.keyboard.press("Escape")
    await page.get_by_role("button", name="Throw away").click()
    await expect(edit).to_be_hidden()
    await choose(page, "m", "Delete…")
    await page.get_by_role("dialog", name="Delete m?").get_by_role("button", name="Delete").click()
    again = page.get_by_role("dialog", name="Delete m anyway?")
    await expect(again).to_contain_text("n stands for m")
    await again.get_by_role("button", name="Delete").click()
    await expect(page.locator(".model")).to_have_count(1)


@pytest.mark.long
@pytest.mark.parametrize("width", [1280, 390])
async def test_nothing_sticks_out(browser: Browser, corral: Corral, width: int) -> None:
    long = "a-model-with-a-rather-long-name/" + "x" * 150
    machine = "a-machine-with-a-rather-long-name-" + "y" * 60
    barn = await corral.fleet.worker(machine, has="llama-cpp")
    await corral.fleet.define(long, description="words " * 100)
    await corral.fleet.ask(long)
    await corral.fleet.until_ready(long)
    other = "another-" + "z" * 150
    barn.starts.failures = ["very-long-" * 60] * 3
    await corral.fleet.define(other)
    await corral.fleet.ask(other)
    await _tell(corral, {"model": long, "served_by": other, "status": 502, "ending": "upstream_broke"})
    async with new_person(browser, viewport={"width": width, "height": 844}, color_scheme="dark") as person:
        page = await corral.open(person)

        async def fits() -> bool:
            return bool(await page.evaluate("document.documentElement.scrollWidth <= innerWidth"))

        await expect(pill_of(page, other)).to_have_text("failed")
        assert await fits()
        await page.get_by_role("button", name="Install a model").click()
        await expect(page.locator("#found li").first).to_be_visible()
        assert await fits()
        await page.get_by_role("button", name=f"Use {long}").click()
        assert await fits()
        await page.keyboard.press("Escape")
        await page.get_by_role("button", name=f"Why? {long}").click()
        await page.locator("#why summary").first.click()
        assert await fits()
        await page.keyboard.press("Escape")
        for act in ("Replicas…", "Edit…"):
            await choose(page, long, act)
            assert await fits()
            await page.keyboard.press("Escape")
        await page.goto(f"{corral.url}/fleet/requests")
        await expect(page.locator("#receipts tbody tr")).to_have_count(1)
        assert await fits()
        await person.assert_clean()


@pytest.mark.long
async def test_without_javascript_the_page_still_tells(browser: Browser, corral: Corral) -> None:
    await corral.fleet.worker("barn", has="llama-cpp")
    await corral.fleet.define("m")
    await corral.fleet.ask("m")
    await corral.fleet.until_ready("m")
    async with new_person(browser, java_script_enabled=False) as person:
        page = await person.tab()
        await page.goto(f"{corral.url}/login?next=/fleet/models")
        await page.get_by_label("API key").fill(await corral.app.key())
        await page.get_by_role("button", name="Sign in").click()
        await expect(pill_of(page, "m")).to_have_text("ready × 1")
        await expect(page.get_by_role("button", name="Why? m")).to_be_hidden()
