"""The overview, the pages of nodes and models, and the search in a real browser: what moves, what is a link, what a
phone shows."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, expect

from corral.contract.catalogue import InstallModel
from corral.contract.receipts import Receipt
from corral.controller.runtime.leadership import Leadership
from corral.controller.samples.recorder import SampleRecorder
from corral.store.records import DesiredReplica
from corral.store.tables import models, replicas
from tests.integration.store.rows import a_replica
from tests.support.chromium import Watched, new_person, open_signed_in
from tests.support.manual_clock import ManualClock
from tests.support.model_catalogue import models_of
from tests.support.page import GIB, PageApp, made_node, open_page_app, served
from tests.support.processes import free_port

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="module")]

MODEL = "org/smollm"


@pytest_asyncio.fixture(loop_scope="module")
async def corral(tmp_path: Path) -> AsyncIterator[PageApp]:
    """Two machines, and a model that is nowhere yet."""
    async with open_page_app(tmp_path) as page:
        await page.put(made_node("barn"), made_node("loft"), labels={"tier": "fast"})
        await models_of(page.store, page.feed).install(InstallModel(definition={"name": MODEL, "backend": "llama-cpp"}))
        yield page


@pytest_asyncio.fixture(loop_scope="module")
async def url(corral: PageApp) -> AsyncIterator[str]:
    async with served(corral, free_port()) as url:
        yield url


@pytest_asyncio.fixture(loop_scope="module")
async def person(browser: Browser) -> AsyncIterator[Watched]:
    async with new_person(browser) as person:
        yield person
        await person.assert_clean()


async def place(corral: PageApp, node: str, stage: str) -> DesiredReplica:
    """A replica of the model, as the reconciler stores it."""
    async with corral.store.write() as tx:
        revision = (await models.get(tx, MODEL)).revision
        node_id = (await corral.nodes.view(node)).id
        row = a_replica(node_id, MODEL, revision=revision, stage=stage, memory_bytes=12 * GIB, devices=())
        await replicas.put(tx, [row])
    corral.feed.notify("nodes")
    return row


async def look_again(person: Watched) -> None:
    """The page looks every few seconds for what no event tells of: it does so now."""
    await person.context.clock.fast_forward(5_000)


async def test_charts_move_with_the_requests(person: Watched, corral: PageApp, url: str) -> None:
    clock = ManualClock(time.time() // 60 * 60 - 60)  # the whole minute before the present one
    leadership = Leadership(corral.store, "here", ttl_s=60)
    recorder = SampleRecorder(
        corral.store, leadership, clock, in_flight_of=lambda node, process: 1, waiting=lambda: {MODEL: 4}
    )
    await person.context.clock.install()
    page = await open_signed_in(person, url, "/", await corral.key("viewer"))
    tokens = page.locator('.chart[data-key="tokens"]')
    await expect(tokens.locator("strong")).to_have_text("–")
    told = [
        Receipt(id=f"r{number}", at=0, key_id="k", model=MODEL, path="/v1/chat/completions", status=200,
                first_byte_ms=120, total_ms=900, prompt_tokens=300, completion_tokens=6000)
        for number in range(20)
    ]  # fmt: skip
    await recorder.on_receipts(told)
    clock.advance(60)
    await recorder.run_once()
    await look_again(person)
    await expect(tokens.locator("strong")).not_to_have_text("–")
    await expect(tokens.locator("path.line.first")).to_have_count(1)
    assert re.search(r"between .* and 2k since 1 h ago", await tokens.locator("svg").get_attribute("aria-label") or "")
    await page.get_by_role("link", name="24 h").click()
    await expect(page).to_have_url(f"{url}/?range=24h")
    await expect(page.get_by_role("link", name="24 h")).to_have_attribute("aria-current", "true")


async def test_the_map_follows_a_model_from_loading_to_gone(person: Watched, corral: PageApp, url: str) -> None:
    await person.context.clock.install()
    page = await open_signed_in(person, url, "/", await corral.key("viewer"))
    barn = page.get_by_role("article", name="barn: healthy")
    await expect(barn).to_contain_text("no model")
    await place(corral, "barn", "ordered")
    await look_again(person)
    block = barn.get_by_role("link", name=f"{MODEL} on barn: starting, 12 GiB")
    await expect(block).to_have_count(1)
    width = float(await block.locator("rect").get_attribute("width") or 0)
    assert width == pytest.approx(300 * 12 / 64 - 1, abs=0.2), "12 of the 64 GiB of the machine"
    await expect(barn.locator(".on-it")).to_contain_text(f"{MODEL} starting")
    row = await place(corral, "barn", "running")
    await look_again(person)
    await expect(barn.get_by_role("link", name=f"{MODEL} on barn: ready, 12 GiB")).to_have_count(1)
    await place(corral, "barn", "leaving")
    await look_again(person)
    await expect(barn.locator("rect.leaving")).to_have_count(1)
    async with corral.store.write() as tx:
        await replicas.delete(tx, [row])
    await look_again(person)
    await expect(barn).to_contain_text("no model")
    assert await page.evaluate("window.sameDocument")


async def test_from_the_map_to_the_node_and_a_drain_that_says_what_it_costs(
    person: Watched, corral: PageApp, url: str
) -> None:
    await place(corral, "barn", "running")
    page = await open_signed_in(person, url, "/", await corral.key())
    await page.get_by_role("article", name="barn: healthy").get_by_role("link", name="barn", exact=True).click()
    await expect(page.get_by_role("heading", name="barn", exact=True)).to_be_visible()
    await expect(page).to_have_url(f"{url}/nodes/barn")
    await page.get_by_role("button", name="Drain…").click()
    dialog = page.get_by_role("dialog", name="Drain barn?")
    await expect(dialog).to_contain_text(f"Ready nowhere else: {MODEL}; requests for it load again.")
    await dialog.get_by_role("button", name="Drain").click()
    await expect(page.locator("#node-head .pill")).to_have_text("draining")
    await expect(page.locator(".history li .pill")).to_have_text(["draining"])
    await page.get_by_role("button", name="Resume").click()
    await expect(page.locator(".history li .pill")).to_have_text(["healthy", "draining"])


async def test_a_budget_and_labels_are_saved_and_refusals_stand_beside_them(
    person: Watched, corral: PageApp, url: str
) -> None:
    page = await open_signed_in(person, url, "/nodes/loft", await corral.key())
    budget = page.get_by_label("VRAM that Corral may use")
    await budget.fill("a lot")
    await budget.press("Enter")
    await expect(page.get_by_role("alert").filter(has_text="a lot")).to_be_visible()
    await budget.fill("12GiB")
    await budget.press("Enter")
    await expect(page.locator("#said")).to_have_text("The budget is saved.")
    labels = page.get_by_label("Labels of your own")
    await expect(labels).to_have_value("tier=fast")
    await labels.fill("zone=attic, spare")
    await labels.press("Enter")
    await expect(page.locator("#node-now .labels li")).to_have_text(["spare", "zone=attic"])
    view = await corral.nodes.view("loft")
    assert (view.vram_budget, view.labels) == ("12GiB", {"spare": "", "zone": "attic"})


async def test_from_the_list_to_a_model_and_back_to_its_node(person: Watched, corral: PageApp, url: str) -> None:
    await place(corral, "barn", "running")
    page = await open_signed_in(person, url, "/fleet/models", await corral.key("viewer"))
    await page.get_by_role("link", name=MODEL, exact=True).click()
    await expect(page.get_by_role("heading", name=MODEL, exact=True)).to_be_visible()
    await expect(page).to_have_url(f"{url}/models/{MODEL}")
    await page.get_by_text("JavaScript", exact=True).click()
    await expect(page.get_by_text('baseURL: "').first).to_be_visible()
    await page.locator(".replicas").get_by_role("link", name="barn").click()
    await expect(page).to_have_url(f"{url}/nodes/barn")
    assert await page.locator("[data-act]").count() == 0, "a viewer has no buttons"


async def test_the_search_from_the_keyboard(person: Watched, corral: PageApp, url: str) -> None:
    page = await open_signed_in(person, url, "/", await corral.key("viewer"))
    field = page.get_by_role("combobox")
    await page.keyboard.press("/")
    await expect(field).to_be_focused()
    await page.keyboard.type("tier=fast")
    options = page.get_by_role("option")
    await expect(options).to_have_count(2)
    await expect(field).to_have_attribute("aria-expanded", "true")
    await page.keyboard.press("ArrowDown")
    await page.keyboard.press("ArrowDown")
    await expect(options.nth(1)).to_have_attribute("aria-selected", "true")
    await page.keyboard.press("ArrowDown")
    await expect(options.nth(0)).to_have_attribute("aria-selected", "true")
    await page.keyboard.press("Escape")
    await expect(page.locator("#search-hits")).to_be_hidden()
    await field.fill("smol")
    await expect(options).to_have_count(1)
    await page.keyboard.press("ArrowDown")
    await page.keyboard.press("Enter")
    await expect(page).to_have_url(f"{url}/models/{MODEL}")
    await page.get_by_role("combobox").fill("nothing like it")
    await page.keyboard.press("Enter")
    await expect(page.get_by_text("Nothing is called “nothing like it”.")).to_be_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_on_a_phone_nothing_sticks_out(browser: Browser, corral: PageApp, url: str, scheme: str) -> None:
    name = "a-machine-with-a-rather-long-name-" + "x" * 60
    await corral.put(made_node(name, status_reason="because " * 30, status="unhealthy"))
    await place(corral, name, "running")
    options = {"viewport": {"width": 390, "height": 844}, "color_scheme": scheme}
    async with new_person(browser, **options) as person:
        page = await open_signed_in(person, url, "/", await corral.key())
        for path in ("/", "/nodes", f"/nodes/{name}", f"/models/{MODEL}", "/search?q=a"):
            await page.goto(f"{url}{path}")
            await expect(page.locator("main")).to_be_visible()
            assert await page.evaluate("document.documentElement.scrollWidth") <= 390, path
        await page.get_by_role("button", name="Pages").click()
        await page.get_by_role("link", name="Operations").click()
        await expect(page).to_have_url(f"{url}/fleet/operations")
        await person.assert_clean()


async def test_every_control_has_a_name_and_every_page_one_heading(browser: Browser, corral: PageApp, url: str) -> None:
    async with new_person(browser) as person:
        page = await open_signed_in(person, url, "/", await corral.key())
        for path in ("/", "/nodes", "/nodes/barn", f"/models/{MODEL}", "/fleet/models", "/search?q=a"):
            await page.goto(f"{url}{path}")
            assert await _unnamed(page) == [], path
            assert await page.locator("h1").count() == 1, path


async def _unnamed(page: Page) -> list[str]:
    """Controls without a name, ids that stand twice, and references to ids that are not there."""
    found: list[str] = await page.evaluate(
        """() => {
          const named = (e) => e.getAttribute("aria-label") || e.textContent.trim() || e.title || e.labels?.length;
          const kinds = "button, a[href], input:not([type=hidden]), select, textarea";
          const controls = [...document.querySelectorAll(kinds)].filter((e) => !e.closest("dialog:not([open])"));
          const ids = [...document.querySelectorAll("[id]")].map((e) => e.id);
          const referred = [...document.querySelectorAll("[aria-labelledby], [aria-controls], [aria-describedby]")]
            .flatMap((e) => ["aria-labelledby", "aria-controls", "aria-describedby"].map((a) => e.getAttribute(a)))
            .filter(Boolean);
          return [
            ...controls.filter((e) => !named(e)).map((e) => `no name: ${e.outerHTML.slice(0, 120)}`),
            ...ids.filter((id, place) => ids.indexOf(id) !== place).map((id) => `twice: ${id}`),
            ...referred.filter((id) => !document.getElementById(id)).map((id) => `not there: ${id}`),
          ];
        }"""
    )
    return found
