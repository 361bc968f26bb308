"""Backends and operations in a real browser, on a controller that really installs; the workers are scripted."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Locator, Page, expect

from corral.contract.messages.backends import NodeBackend, NodeDrift, UpgradeInfo
from corral.store.tables import node_backends, nodes, revisions
from corral.store.tables.node_backends import Inventory
from tests.support.backend_fleet import Fleet
from tests.support.chromium import Watched, new_person, open_signed_in
from tests.support.page import PageApp, made_node, open_backend_page, served
from tests.support.processes import free_port
from tests.support.scripted_catalogue import build
from tests.support.scripted_worker import CorralWorker
from tests.support.waiting import until

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="module")]

NASTY = "<img src=x onerror=alert(1)>"


@dataclass
class Corral:
    app: PageApp
    fleet: Fleet
    url: str

    async def open(self, person: Watched, path: str, role: str = "admin") -> Page:
        return await open_signed_in(person, self.url, path, await self.app.key(role))

    async def worker(self, name: str, **has: str) -> CorralWorker:
        """With these versions of backends already on it."""
        worker = await self.fleet.corral(name)
        for backend, version in has.items():
            worker.put(backend, version=version, digest=f"sha256:{backend}-{version}")
        await worker.beat()
        await until(lambda: self._has(name, sorted(has)))
        return worker

    async def newer(self, backend: str, installed: str, version: str, *drifting: tuple[str, str]) -> None:
        """The gallery has something newer, and those nodes have something else than the others."""
        digest = f"sha256:{backend}-{version}"
        self.fleet.catalogue.builds.setdefault(backend, {"*": build(backend)})
        self.fleet.catalogue.publish(backend, digest, version=version)
        drift = tuple(NodeDrift(f"id-of-{name}", name, other, f"sha256:{backend}-{other}") for name, other in drifting)
        told = UpgradeInfo(backend, installed, version, f"sha256:{backend}-{installed}", digest, drift)
        self.fleet.catalogue.newer = {backend: told}
        await self.fleet.first.backends.upgrades.check(refresh=True)

    async def _has(self, name: str, backends: list[str]) -> bool:
        return await self.fleet.inventory(name) == backends


@pytest_asyncio.fixture(loop_scope="module")
async def corral(tmp_path: Path) -> AsyncIterator[Corral]:
    async with open_backend_page(tmp_path) as (app, fleet), served(app, free_port()) as url:
        yield Corral(app, fleet, url)
        app.feed.end()  # open streams must not hold the server up


@pytest_asyncio.fixture(loop_scope="module")
async def person(browser: Browser, corral: Corral) -> AsyncIterator[Watched]:
    async with new_person(browser) as person:
        yield person
        await person.assert_clean()


def operation_of(page: Page, what: str) -> Locator:
    return page.locator(".op", has=page.get_by_role("heading", name=what))


def node_of(operation: Locator, name: str) -> Locator:
    return operation.locator(f'.op-nodes li[data-node="id-of-{name}"]')


async def test_the_matrix_marks_who_differs_and_one_button_upgrades_all(person: Watched, corral: Corral) -> None:
    workers = [await corral.worker(name, vllm="1.0") for name in ("attic", "barn")]
    workers.append(await corral.worker("shed", vllm="0.9"))
    await corral.newer("vllm", "1.0", "2.0", ("shed", "0.9"))
    page = await corral.open(person, "/fleet/backends")
    row = page.get_by_role("row", name="vllm")
    await expect(row.get_by_role("cell").locator(".version")).to_have_text(["1.0", "1.0", "0.9"])
    await expect(row.get_by_role("cell").nth(2)).to_contain_text("differs")
    await expect(row.get_by_role("rowheader")).to_contain_text("on 3 of 3 nodes: 1.0 on 2, 0.9 on 1")
    await expect(row.get_by_role("rowheader")).to_contain_text("update to 2.0")
    await page.get_by_role("link", name="differ 1").click()
    await expect(page.locator("thead .c-node")).to_have_text([re.compile("shed")])
    await expect(page).to_have_url(f"{corral.url}/fleet/backends?only=drift")
    await page.get_by_role("link", name="all nodes 3").click()

    await expect(page.locator("#updates")).to_have_text("1 update available")
    await page.get_by_role("button", name="Upgrade all").click()
    ask = page.get_by_role("dialog", name="Upgrade all?")
    await expect(ask.get_by_role("status")).to_contain_text("upgrade on 3 of 3 nodes")
    await expect(ask.get_by_role("row", name="shed")).to_contain_text("0.9 → 2.0")
    assert not any(worker.orders() for worker in workers), "a plan does nothing"
    await ask.get_by_role("button", name="Upgrade all").click()
    await expect(page.locator("#said")).to_contain_text("1 upgrade started.")
    await expect(row.get_by_role("cell").locator(".version")).to_have_text(["2.0", "2.0", "2.0"])
    assert await page.evaluate("window.sameDocument")


async def test_roll_back_and_delete_show_their_plan_first(person: Watched, corral: Corral) -> None:
    barn = await corral.worker("barn", vllm="1.0")
    barn.put("vllm", version="2.0", digest="sha256:new", previous=["sha256:vllm-1.0"])
    await corral.worker("loft", vllm="1.0")
    await barn.beat()
    page = await corral.open(person, "/fleet/backends")
    row = page.get_by_role("row", name="vllm")
    menu, ask = page.locator("#menu"), page.get_by_role("dialog")

    async def choose(verb: str) -> None:
        await page.get_by_role("button", name="Actions for vllm").click()
        await menu.get_by_role("button", name=verb).click()

    await expect(row.get_by_role("cell").locator(".version")).to_have_text(["2.0", "1.0"])
    await choose("Roll back")
    await expect(ask.get_by_role("row", name="loft")).to_contain_text("it has this build already")
    await page.keyboard.press("Escape")
    await expect(ask).to_be_hidden()
    await choose("Delete")
    await expect(ask.get_by_role("status")).to_have_text("delete on 2 of 2 nodes.")
    await ask.get_by_label("Name of the node").fill("barn")
    await ask.get_by_label("Name of the node").press("Tab")
    await expect(ask.get_by_role("row")).to_have_count(2)  # the head, and barn
    await ask.get_by_role("button", name="Delete").click()
    await expect(row.get_by_role("cell").first).to_have_text("–")
    await expect(row.get_by_role("cell").last).to_contain_text("1.0")


async def test_install_from_a_gallery_and_from_a_uri(person: Watched, corral: Corral) -> None:
    await corral.worker("barn")
    await corral.fleet.node("loft", status="offline", labels={"tier": "slow"})
    page = await corral.open(person, "/fleet/backends")
    await expect(page.get_by_text("No backend is installed yet.")).to_be_visible()
    await page.get_by_role("button", name="Install a backend").click()
    await page.get_by_label("From the galleries").fill("lla")
    await expect(page.locator("#found strong")).to_have_text(["llama-cpp"])
    await page.get_by_role("button", name="Install… llama-cpp").click()
    ask = page.get_by_role("dialog", name="Install llama-cpp?")
    await expect(ask.get_by_role("status")).to_contain_text("install on 1, install later on 1")
    await ask.get_by_role("button", name="Install").click()
    row = page.get_by_role("row", name="llama-cpp")
    await expect(row.get_by_role("cell").first).to_have_text("1.0")
    await expect(row.get_by_role("cell").last).to_contain_text("install waits")
    await expect(row.get_by_role("cell").last).to_contain_text("offline")
    await expect(page.locator("#work")).to_contain_text("install llama-cpp waiting")

    await page.get_by_label("URI", exact=True).fill("oci://registry.test/mine:1")
    await page.get_by_label("Name", exact=True).fill("mine")
    await page.locator("#own").get_by_role("button", name="Install").click()
    ask = page.get_by_role("dialog", name="Install mine?")
    await ask.get_by_label("Labels of the nodes").fill("tier=none")
    await ask.get_by_label("Labels of the nodes").press("Tab")
    await expect(ask.get_by_role("status")).to_contain_text("no node")
    await ask.get_by_label("every node").check()
    await expect(ask.get_by_role("row", name="barn")).to_be_visible()
    await ask.get_by_role("button", name="Install").click()
    await expect(page.get_by_role("row", name="mine").get_by_role("cell").first).to_have_text("1.0")


async def test_an_operation_moves_from_nothing_to_done_and_stays_open(person: Watched, corral: Corral) -> None:
    barn, loft = await corral.worker("barn"), await corral.worker("loft")
    hold = barn.script.hold = loft.script.hold = asyncio.Event()
    page = await corral.open(person, "/fleet/operations")
    await expect(page.get_by_text("No operation is running.")).to_be_visible()
    job = await corral.fleet.install("vllm")
    operation = operation_of(page, "install vllm on every node")
    await expect(operation.locator(".op-head .pill")).to_have_text("under way")
    await expect(operation.locator(".op-nodes")).to_be_hidden()
    await operation.get_by_text("2 nodes", exact=True).click()
    row = node_of(operation, "barn")
    await expect(row.locator("progress")).to_have_attribute("value", "0")
    await corral.fleet.until_row(job, "barn", "downloading")
    for seq, percent in ((1, 25.0), (2, 75.5)):
        told = {"phase": "downloading", "file_name": "layer", "total_bytes": 4 * 2**20, "rate": 2**20}
        size = int(percent * 4 * 2**20 / 100)
        await barn.progress(job, backend="vllm", attempt=1, seq=seq, percentage=percent, current_bytes=size, **told)
        await expect(row.locator("progress")).to_have_attribute("value", str(int(percent)))
    await expect(row).to_contain_text("3 / 4 MiB, 1 MiB/s")
    await expect(row).to_contain_text("downloading · layer")
    await expect(page.locator("#work")).to_contain_text("install vllm 37 %")
    await expect(operation.locator(".op-nodes")).to_be_visible()
    hold.set()
    await expect(row.locator(".pill")).to_have_text("done")
    await expect(operation.locator(".op-head .pill")).to_have_text("done")
    await expect(operation.locator(".op-nodes")).to_be_visible()
    await expect(page.locator("#spoken")).to_have_text("install vllm on every node: done.")
    await expect(page.locator("#work")).to_be_hidden()
    assert await page.evaluate("window.sameDocument")
    await page.reload()
    await expect(page.locator("#history")).to_contain_text("install vllm")
    await expect(page.locator(".op")).to_have_count(0)


async def test_cancel_and_retry_on_one_node_leave_the_others_alone(person: Watched, corral: Corral) -> None:
    barn, loft, shed = [await corral.worker(name) for name in ("barn", "loft", "shed")]
    hold = barn.script.hold = loft.script.hold = asyncio.Event()
    shed.script.failures = [{"error": "the registry answered 503"}] * 9  # until somebody asks, however long that takes
    await corral.fleet.install("vllm")
    page = await corral.open(person, "/fleet/operations")
    operation = operation_of(page, "install vllm")
    await operation.get_by_text("3 nodes", exact=True).click()
    failing = node_of(operation, "shed")
    await expect(failing.locator(".pill")).to_have_text("failing")
    await expect(failing).to_contain_text("the registry answered 503")
    await expect(failing).to_contain_text(re.compile(r"next try in \d+ s"))

    await operation.get_by_role("button", name="Cancel on barn").click()
    await page.get_by_role("dialog", name="Cancel install vllm on barn?").get_by_role("button", name="Stop it").click()
    await expect(page.locator("#said")).to_contain_text("Cancelled on barn.")
    await expect(node_of(operation, "barn").locator(".pill")).to_have_text("cancelled")
    await expect(node_of(operation, "loft").locator(".pill")).to_have_text("under way")
    await until(lambda: bool(barn.orders("cancel")), "the order to stop")
    assert not loft.orders("cancel")

    shed.script.failures = []
    await operation.get_by_role("button", name="Retry on shed").click()
    await expect(failing.locator(".pill")).to_have_text("done")
    await expect(operation.get_by_role("button", name="Retry on shed")).to_be_hidden()
    hold.set()
    await expect(node_of(operation, "loft").locator(".pill")).to_have_text("done")
    assert "vllm" not in barn.installed


async def test_withdraw_dismiss_and_ask_again(person: Watched, corral: Corral) -> None:
    await corral.fleet.node("away", status="offline")
    await corral.fleet.install("vllm")
    page = await corral.open(person, "/fleet/operations")
    operation = operation_of(page, "install vllm")
    await expect(operation.locator(".op-head .pill")).to_have_text("waiting")
    await expect(node_of(operation, "away")).to_be_visible()  # one alone needs no opening

    async def choose(verb: str) -> None:
        await operation.get_by_role("button", name="More for install vllm").click()
        await page.locator("#menu").get_by_role("button", name=verb).click()

    await choose("Withdraw")
    await page.get_by_role("dialog").get_by_role("button", name="Withdraw").click()
    await expect(operation.locator(".op-head .pill")).to_have_text("cancelled")
    await choose("Dismiss")
    await expect(operation).to_have_count(0)
    await page.locator("#history").get_by_role("button", name="Ask again to install vllm").click()
    await expect(operation.locator(".op-head .pill")).to_have_text("waiting")


async def test_a_viewer_sees_all_of_it_and_has_no_levers(person: Watched, corral: Corral) -> None:
    await corral.worker("barn", vllm="1.0")
    await corral.newer("vllm", "1.0", "2.0")
    await corral.fleet.node("away", status="offline")
    await corral.fleet.install("llama-cpp", node="away")
    page = await corral.open(person, "/fleet/backends", "viewer")
    await expect(page.get_by_text("update to 2.0")).to_be_visible()
    await expect(page.get_by_text("install waits")).to_be_visible()
    for path in ("/fleet/backends", "/fleet/operations"):
        await page.goto(f"{corral.url}{path}")
        await expect(page.locator("html")).to_have_class("js")
        await expect(page.get_by_role("main")).to_be_visible()
        assert await page.locator("main button").all_text_contents() == []
    await expect(operation_of(page, "install llama-cpp")).to_contain_text("waiting")


async def test_whatever_backends_and_errors_are_called_is_text(person: Watched, corral: Corral) -> None:
    barn = await corral.worker("barn", **{NASTY: NASTY})
    barn.put(NASTY, version=NASTY, digest=NASTY)
    barn.script.failures = [{"error": NASTY, "permanent": True}]
    await barn.beat()
    corral.fleet.catalogue.builds[NASTY] = {"*": build(NASTY, version=NASTY)}
    page = await corral.open(person, "/fleet/backends")
    page.on("dialog", lambda dialog: person.complaints.append(f"dialog: {dialog.message}"))
    await expect(page.locator("#cells .name")).to_have_text([NASTY])
    await page.get_by_role("button", name="Install a backend").click()
    await expect(page.locator("#found strong").first).to_have_text(NASTY)
    await page.get_by_role("button", name=f"Actions for {NASTY}").click()
    await page.locator("#menu").get_by_role("button", name="Delete").click()
    await expect(page.get_by_role("dialog")).to_contain_text(f"Delete {NASTY}?")
    await page.keyboard.press("Escape")
    await corral.fleet.install("vllm")
    await expect(page.locator("#cells .failing .note")).to_have_text(NASTY)
    await page.goto(f"{corral.url}/fleet/operations")
    await expect(operation_of(page, "install vllm").locator(".why")).to_contain_text(NASTY)
    await expect(page.locator("html")).to_have_class("js")
    assert await page.locator("img[src=x]").count() == 0


@pytest.mark.long
async def test_a_thousand_nodes_are_counted_and_shown_in_pieces(person: Watched, corral: Corral) -> None:
    await _put_fleet(corral, 1000)
    await corral.newer("vllm", "1.0", "2.0", ("node-0500", "0.9"))
    page = await corral.open(person, "/fleet/backends")
    header = page.get_by_role("row", name="vllm").get_by_role("rowheader")
    await expect(header).to_contain_text("on 1000 of 1000 nodes: 1.0 on 999, 0.9 on 1")
    await expect(page.locator("thead .c-node")).to_have_count(24)
    await page.get_by_role("link", name="next →").click()
    await expect(page.locator(".pager")).to_contain_text("Nodes 25–48 of 1000")
    await page.get_by_label("Find nodes by name").fill("node-09")
    await expect(page.locator(".pager")).to_contain_text("Nodes 1–24 of 100 (1000 in all)")
    await page.get_by_label("Find nodes by name").fill("")
    await page.get_by_role("link", name="differ 1").click()
    await expect(page.locator("thead .c-node")).to_have_text([re.compile("node-0500")])


async def test_an_operation_on_many_nodes_is_filtered_and_shown_in_pieces(person: Watched, corral: Corral) -> None:
    await _put_fleet(corral, 130)
    job = await corral.fleet.install("llama-cpp")
    await until(lambda: _rows(corral, job, 130), "a row for everybody")
    page = await corral.open(person, "/fleet/operations")
    operation = operation_of(page, "install llama-cpp")
    await expect(operation.locator(".op-nodes")).to_have_count(0)
    await operation.get_by_text("130 nodes", exact=True).click()
    names = operation.locator(".op-nodes .name")
    await expect(names).to_have_count(100)
    await operation.get_by_role("link", name="next →").click()
    await expect(operation.locator(".pager")).to_contain_text("Nodes 101–130 of 130")
    await expect(names.first).to_have_text("node-0100")
    await corral.fleet.operations.cancel(job, node="node-0007")
    await operation.get_by_role("link", name="cancelled 1").click()
    await expect(names).to_have_text(["node-0007"])
    await page.reload()
    await expect(names).to_have_text(["node-0007"])


@pytest.mark.parametrize("width", [1280, 390])
async def test_nothing_sticks_out(browser: Browser, corral: Corral, width: int) -> None:
    long = "a-machine-with-a-rather-long-name-that-nobody-would-type-" + "x" * 60
    workers = [await corral.worker(name, vllm="1.0") for name in (long, *"bcdefghi")]
    workers[0].script.failures = [{"error": "http://" + "very-long-" * 20}]
    await corral.newer("vllm", "1.0", "2.0" * 20, (long, "1.0"))
    job = await corral.fleet.install("llama-cpp")
    await corral.fleet.until_row(job, long, "error")
    async with new_person(browser, viewport={"width": width, "height": 844}, color_scheme="dark") as person:
        page = await corral.open(person, "/fleet/backends")
        await page.get_by_role("button", name="Install a backend").click()
        await expect(page.locator("#found li").first).to_be_visible()
        assert await page.evaluate("document.documentElement.scrollWidth") <= width
        await page.get_by_role("button", name="Upgrade all").click()
        await expect(page.get_by_role("dialog").get_by_role("row").nth(1)).to_be_visible()
        assert await page.evaluate("document.documentElement.scrollWidth") <= width
        await page.goto(f"{corral.url}/fleet/operations")
        await operation_of(page, "install llama-cpp").get_by_text("9 nodes", exact=True).click()
        assert await page.evaluate("document.documentElement.scrollWidth") <= width
        await person.assert_clean()


async def test_without_javascript_the_pages_still_tell(browser: Browser, corral: Corral) -> None:
    await corral.worker("barn", vllm="1.0")
    await corral.fleet.node("away", status="offline")
    await corral.fleet.install("llama-cpp", node="away")
    async with new_person(browser, java_script_enabled=False) as person:
        page = await person.tab()
        await page.goto(f"{corral.url}/fleet/backends")
        await expect(page).to_have_url(f"{corral.url}/login?next=/fleet/backends")
        await page.get_by_label("API key").fill(await corral.app.key())
        await page.get_by_role("button", name="Sign in").click()
        await expect(page.get_by_role("row", name="vllm").get_by_role("cell").last).to_contain_text("1.0")
        await page.get_by_role("link", name="waiting 1").click()
        await expect(page.locator("thead .c-node")).to_have_text([re.compile("away")])
        await page.get_by_role("link", name="Operations").click()
        await expect(operation_of(page, "install llama-cpp on away")).to_contain_text("offline")
        for dead in ("Cancel", "Install a backend"):
            await expect(page.get_by_role("button", name=dead)).to_have_count(0)


async def _put_fleet(corral: Corral, count: int) -> None:
    """Nodes that are away: nobody answers for them, so nothing moves but what the test moves."""
    async with corral.fleet.store.write() as tx:
        for number in range(count):
            name = f"node-{number:04}"
            node = made_node(name, "offline", id=f"id-of-{name}", status_reason="no heartbeat")
            await nodes.insert(tx, node)
            version = "0.9" if number == 500 else "1.0"
            row: Any = NodeBackend(name="vllm", version=version, digest=f"sha256:vllm-{version}")
            await node_backends.put(
                tx, Inventory(node_id=node.id, boot_id="boot-1", seq=1, seen_at=await tx.now(), backends=(row,))
            )
        await revisions.bump(tx, "nodes")
    corral.fleet.first.feed.notify("nodes")


async def _rows(corral: Corral, job: str, count: int) -> bool:
    view = await corral.fleet.view(job)
    return len(view.nodes) == count and all(row.waits for row in view.nodes)
