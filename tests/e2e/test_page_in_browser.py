"""The page in a real browser, on the controller's real doors; nodes are rows, so each test has the fleet it needs."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, Route, expect

from corral.contract.codec import encode
from corral.store.tables import nodes, revisions
from tests.support.chromium import Watched, new_person, open_signed_in, sign_in
from tests.support.page import GIB, PageApp, made_node, open_page_app, served
from tests.support.processes import free_port
from tests.support.waiting import until

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="module")]

NASTY = "<img src=x onerror=alert(1)>"


@pytest_asyncio.fixture(loop_scope="module")
async def corral(tmp_path: Path) -> AsyncIterator[PageApp]:
    async with open_page_app(tmp_path) as page:
        yield page


@pytest_asyncio.fixture(loop_scope="module")
async def url(corral: PageApp) -> AsyncIterator[str]:
    async with served(corral, free_port()) as url:
        yield url


@pytest_asyncio.fixture(loop_scope="module")
async def person(browser: Browser, url: str) -> AsyncIterator[Watched]:
    """Whatever a test does, the page must not have stumbled or broken its own policy."""
    async with new_person(browser) as person:
        yield person
        await person.assert_clean()


async def open_fleet(person: Watched, corral: PageApp, url: str, role: str = "admin") -> Page:
    return await open_signed_in(person, url, "/nodes", await corral.key(role))


async def test_a_wrong_key_then_the_right_one_then_out(person: Watched, corral: PageApp, url: str) -> None:
    page = await person.tab()
    await page.goto(url)
    await page.wait_for_url(f"{url}/login")
    await expect(page.get_by_label("API key")).to_be_focused()
    await page.keyboard.type("ck_wrong")
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("alert")).to_have_text("The API key is not known here.")
    await sign_in(page, url, await corral.key())
    await expect(page.get_by_role("heading", name="Overview")).to_be_visible()
    await page.get_by_role("button", name="Sign out").click()
    await expect(page.get_by_role("alert")).to_have_text("You are signed out.")
    await page.go_back()
    await expect(page.get_by_label("API key")).to_be_visible()
    await page.goto(url)
    await expect(page).to_have_url(f"{url}/login")


async def test_rows_come_change_and_go_without_a_reload(person: Watched, corral: PageApp, url: str) -> None:
    await corral.put(made_node("barn"), made_node("stable"))
    page = await open_fleet(person, corral, url)
    await page.evaluate("window.sameDocument = true")
    names = page.locator("tbody .name")
    await expect(names).to_have_text(["barn", "stable"])

    await corral.put(made_node("loft"), labels={"tier": "fast"})
    await expect(names).to_have_text(["barn", "loft", "stable"])
    loft = page.get_by_role("row", name="loft")
    await expect(loft.locator(".labels li")).to_have_text(["tier=fast"])

    await corral.change("barn", status="unhealthy", status_reason="does not answer on the bus")
    barn = page.get_by_role("row", name="barn")
    await expect(barn.locator(".pill")).to_have_text("unhealthy")
    await expect(barn.locator(".pill")).to_have_attribute("title", "does not answer on the bus")
    await expect(barn).to_contain_text("does not answer on the bus")
    await expect(page.locator("#attention-line")).to_have_text("1 node is unhealthy.")
    await expect(page.locator("#spoken")).to_have_text("1 node is unhealthy.")
    await expect(page.get_by_role("button", name="unhealthy 1")).to_be_visible()

    await corral.change("stable", available_vram=12 * GIB)
    await expect(page.get_by_role("row", name="stable")).to_contain_text("12 / 24 GiB")

    await corral.remove("stable")
    await expect(names).to_have_text(["barn", "loft"])
    assert await page.evaluate("window.sameDocument")


async def test_nodes_that_went_together_can_come_back_together(person: Watched, corral: PageApp, url: str) -> None:
    both = made_node("barn"), made_node("loft")
    await corral.put(*both, made_node("shed"))
    page = await open_fleet(person, corral, url)
    names = page.locator("tbody .name")
    await until(lambda: _followers(corral, 1), "one follower")
    async with corral.store.write() as tx:
        for node in both:
            await nodes.delete(tx, node.id)
        await revisions.bump(tx, "nodes")
    await expect(names).to_have_text(["shed"])
    await corral.put(*both)
    await expect(names).to_have_text(["barn", "loft", "shed"])


async def test_a_stream_that_lost_something_is_started_over(person: Watched, corral: PageApp, url: str) -> None:
    await corral.put(made_node("barn"))
    page = await person.tab()
    node = encode(await corral.nodes.view("barn")).decode()
    told = f'event: node\ndata: {node}\n\nevent: ready\ndata: {{"nodes": 2}}\n\n'
    await page.route("**/api/events*", lambda route: route.fulfill(content_type="text/event-stream", body=told))
    await sign_in(page, url, await corral.key(), "/nodes")
    await expect(page.get_by_text("Connection lost")).to_be_visible()
    await page.unroute("**/api/events*")
    await expect(page.get_by_text("Connection lost")).to_be_hidden()
    await expect(page.locator("tbody .name")).to_have_text(["barn"])


async def test_ages_tick_and_do_not_trust_the_browsers_clock(person: Watched, corral: PageApp, url: str) -> None:
    await corral.put(made_node("barn", last_heartbeat=datetime.now(UTC)))
    page = await person.tab()
    await page.add_init_script("const real = Date.now; Date.now = () => real() + 3600_000")  # an hour ahead
    await sign_in(page, url, await corral.key(), "/nodes")
    seen = page.get_by_role("row", name="barn").locator("time")
    await expect(seen).to_have_text(re.compile(r"^[1-9]\d? s ago$"))
    before = await seen.text_content()
    assert before is not None
    await expect(seen).not_to_have_text(before)
    await expect(seen).to_have_text(re.compile(r"^[1-9]\d? s ago$"))


async def test_approve_one_and_then_all(person: Watched, corral: PageApp, url: str) -> None:
    await corral.put(made_node("barn"))
    page = await open_fleet(person, corral, url)
    await corral.put(*(made_node(name, "pending") for name in ("attic", "loft", "shed")))
    await expect(page.locator("#attention-line")).to_have_text("3 nodes wait for approval.")

    await page.get_by_role("button", name="Approve attic").click()
    await expect(page.locator("#said")).to_contain_text("attic is approved.")
    await expect(page.get_by_role("row", name="attic").locator(".pill")).to_have_text("healthy")
    assert (await corral.nodes.view("attic")).status == "healthy"

    await page.get_by_role("button", name="Approve all 2").click()
    await expect(page.locator("#attention-line")).to_have_text("All 4 nodes are healthy.")
    await expect(page.get_by_role("button", name="Approve")).to_have_count(0)


async def test_drain_resume_and_delete_ask_first(person: Watched, corral: PageApp, url: str) -> None:
    await corral.put(made_node("barn"), made_node("loft"))
    page = await open_fleet(person, corral, url)
    pill = page.get_by_role("row", name="barn").locator(".pill")
    menu, dialog = page.locator("#menu"), page.get_by_role("dialog", name="barn?")

    async def choose(verb: str) -> None:
        await page.get_by_role("button", name="Actions for barn").click()
        await menu.get_by_role("button", name=verb).click()

    await choose("Drain")
    await dialog.get_by_role("button", name="Cancel").click()
    await expect(pill).to_have_text("healthy")
    await choose("Drain")
    await dialog.get_by_role("button", name="Drain").click()
    await expect(pill).to_have_text("draining")
    await choose("Resume")
    await expect(pill).to_have_text("healthy")

    await choose("Delete")
    await expect(dialog).to_contain_text("credentials end at once")
    await page.keyboard.press("Escape")
    await expect(dialog).to_be_hidden()
    await choose("Delete")
    await dialog.get_by_role("button", name="Delete").click()
    await expect(page.locator("tbody .name")).to_have_text(["loft"])


async def test_the_menu_works_from_the_keyboard(person: Watched, corral: PageApp, url: str) -> None:
    await corral.put(made_node("barn"))
    page = await open_fleet(person, corral, url)
    await page.get_by_role("button", name="Actions for barn").press("Enter")
    await expect(page.locator("#menu").get_by_role("button", name="Drain")).to_be_focused()
    await page.keyboard.press("Escape")
    await expect(page.locator("#menu")).to_be_hidden()
    await expect(page.get_by_role("button", name="Actions for barn")).to_be_focused()


async def test_the_first_news_leave_the_focus_where_it_is(person: Watched, corral: PageApp, url: str) -> None:
    for name in ("barn", "byre", "coop"):
        await corral.put(made_node(name))
    page, told = await person.tab(), asyncio.Event()

    async def later(route: Route) -> None:
        await told.wait()
        await route.continue_()

    await page.route("**/api/events*", later)
    await sign_in(page, url, await corral.key(), "/nodes")
    await expect(page.locator("html")).to_have_class("js")
    actions = page.get_by_role("button", name="Actions for byre")
    await actions.focus()
    told.set()
    await corral.put(made_node("attic"))  # once it is seen, everything before it was
    await expect(page.get_by_role("rowheader")).to_have_text(["attic", "barn", "byre", "coop"])
    await expect(actions).to_be_focused()


async def test_a_refusal_is_told_in_the_servers_words(person: Watched, corral: PageApp, url: str) -> None:
    await corral.put(made_node("barn", "pending"))
    page = await open_fleet(person, corral, url)
    approve = page.get_by_role("button", name="Approve barn")
    await expect(approve).to_be_visible()
    # Somebody else is quicker, and our page has not heard of it yet.
    await page.route("**/page/nodes", lambda route: route.abort())
    await corral.nodes.approve("barn")
    await approve.click()
    await expect(page.locator("#said")).to_have_text("barn is healthy, not pending")


async def test_a_join_line_is_made_and_shown_once(person: Watched, corral: PageApp, url: str) -> None:
    page = await open_fleet(person, corral, url)
    await expect(page.get_by_text("Add a machine: it joins with a single line.")).to_be_visible()
    await page.get_by_role("button", name="Add a machine").click()
    await page.get_by_role("spinbutton", name="Machines").fill("3")
    await page.get_by_label("pre-approve them").check()
    await page.get_by_role("button", name="Make a join line").click()
    line = page.locator("#join-command")
    await expect(line).to_have_text(re.compile(r"^printf %s cj_[a-z2-7]{52} \| sh -c 'u=http://127\.0\.0\.1:8080; "))
    short = page.locator("#join-short")
    await expect(short).to_have_text(re.compile(r"^corral join http://127\.0\.0\.1:8080 --token cj_[a-z2-7]{52}$"))
    await expect(page.get_by_text("corral up --lan")).to_be_visible()
    (token,) = await corral.join_tokens.list_views()
    assert (token.uses_left, token.pre_approved) == (3, True)

    await person.context.grant_permissions(["clipboard-read", "clipboard-write"])
    await page.get_by_role("button", name="Copy").click()
    await expect(page.get_by_role("button", name="Copied")).to_be_visible()
    assert await page.evaluate("navigator.clipboard.readText()") == await line.text_content()

    await page.get_by_role("button", name="Close").click()
    await expect(line).to_be_hidden()
    for secret in (line, short):
        assert await secret.text_content() == "", "the secret is not left in the page"


async def test_a_viewer_sees_it_live_and_has_no_buttons(person: Watched, corral: PageApp, url: str) -> None:
    await corral.put(made_node("barn", "pending"))
    page = await open_fleet(person, corral, url, "viewer")
    await corral.put(made_node("loft"))
    await expect(page.locator("tbody .name")).to_have_text(["barn", "loft"])
    await expect(page.locator("#attention-line")).to_have_text("1 node waits for approval.")
    assert await page.locator("button").evaluate_all("all => all.map(b => b.textContent.trim().split(/\\s/)[0])") == [
        "",  # the navigation, where there is no room for it
        "Sign",
        "all",
        "healthy",
        "pending",
        "unhealthy",
        "draining",
        "offline",
    ]
    # And the server does not rely on that.
    refused = await page.evaluate(
        """fetch("/api/nodes/barn/approve", {method: "POST", headers: {"X-CSRF-Token": document.body.dataset.csrf}})
           .then(answer => answer.status)"""
    )
    assert refused == 403


async def test_what_other_machines_say_is_text(person: Watched, corral: PageApp, url: str) -> None:
    page = await open_fleet(person, corral, url)
    page.on("dialog", lambda dialog: person.complaints.append(f"dialog: {dialog.message}"))
    await corral.put(
        made_node(NASTY, status_reason=NASTY, ingress_error=NASTY, version=NASTY), labels={"a": NASTY, NASTY: "b"}
    )
    await corral.put(made_node(NASTY + "2", "pending", ingress_url=NASTY))
    await expect(page.locator("tbody .name")).to_have_text([NASTY, NASTY + "2"])
    await expect(page.locator("#attention")).to_contain_text(NASTY)
    await page.get_by_role("button", name=f"Actions for {NASTY}").first.click()
    await page.locator("#menu").get_by_role("button", name="Delete").click()
    await expect(page.get_by_role("dialog")).to_contain_text(f"Delete {NASTY}?")
    assert await page.locator("img[src=x]").count() == 0


async def test_an_inline_script_would_not_run(browser: Browser, corral: PageApp, url: str) -> None:
    """The policy is the second wall; this is what it does, and that the other tests would notice a breach."""
    async with new_person(browser) as person:
        page = await open_fleet(person, corral, url)
        await page.evaluate(
            """() => {
              const script = document.createElement("script");
              script.textContent = "window.ran = true";
              document.body.append(script);
              document.body.setAttribute("onclick", "window.ran = true");
              document.body.click();
            }"""
        )
        assert not await page.evaluate("window.ran ?? false")
        with pytest.raises(AssertionError, match="script-src"):
            await person.assert_clean()


async def test_the_server_goes_away_and_comes_back(browser: Browser, corral: PageApp) -> None:
    port = free_port()
    await corral.put(made_node("barn"), made_node("loft"))
    async with new_person(browser) as person:
        async with served(corral, port) as url:
            page = await open_fleet(person, corral, url)
            await expect(page.locator("tbody .name")).to_have_text(["barn", "loft"])
            await expect(page.get_by_text("Connection lost")).to_be_hidden()
        await expect(page.get_by_text("Connection lost, reconnecting…")).to_be_visible()
        await expect(page.locator("body")).to_have_class("stale")
        await expect(page.locator("tbody .name")).to_have_text(["barn", "loft"])  # greyed, not gone
        await corral.remove("barn")
        await corral.put(made_node("shed"))
        async with served(corral, port):
            await expect(page.get_by_text("Connection lost")).to_be_hidden()
            await expect(page.locator("body")).not_to_have_class("stale")
            await expect(page.locator("tbody .name")).to_have_text(["loft", "shed"])
            await corral.put(made_node("yard"))
            await expect(page.locator("tbody .name")).to_have_text(["loft", "shed", "yard"])
            await person.assert_clean()
            await page.close()


async def test_a_session_that_ends_leads_back_to_the_sign_in(person: Watched, corral: PageApp, url: str) -> None:
    page = await person.tab()
    key = await corral.key(name="lost laptop")
    await corral.key(name="another")
    await sign_in(page, url, key)
    await expect(page.get_by_role("heading", name="Overview")).to_be_visible()
    await until(lambda: _followers(corral, 1), "one follower")
    await corral.access.revoke("lost laptop", by="somebody")
    await page.wait_for_url(f"{url}/login?why=ended")
    await expect(page.get_by_role("alert")).to_have_text("Your session has ended. Please sign in again.")


async def test_following_a_link_from_another_site_stays_signed_in(person: Watched, corral: PageApp, url: str) -> None:
    await open_fleet(person, corral, url)
    page = await person.tab()
    elsewhere = url.replace("127.0.0.1", "localhost")
    await page.route(
        f"{elsewhere}/chat", lambda route: route.fulfill(body=f'<a href="{url}/">', content_type="text/html")
    )
    await page.goto(f"{elsewhere}/chat")
    await page.evaluate("document.querySelector('a').click()")
    await expect(page.get_by_role("heading", name="Overview")).to_be_visible()
    await expect(page).to_have_url(f"{url}/")


async def test_filter_and_status_buttons(person: Watched, corral: PageApp, url: str) -> None:
    await corral.put(made_node("barn"), labels={"tier": "fast"})
    await corral.put(made_node("loft", "draining", arch="arm64"), made_node("shed", "offline"))
    page = await open_fleet(person, corral, url)
    shown = page.locator("tbody tr:not([hidden]) .name")
    box = page.get_by_role("searchbox")
    for words, names in (
        ("BAR", ["barn"]),
        ("tier=fast", ["barn"]),
        ("4090 arm64", ["loft"]),
        ("nothing like it", []),
        ("", ["barn", "loft", "shed"]),
    ):
        await box.fill(words)
        await expect(shown).to_have_text(names)
        await expect(page.get_by_text("No node fits the filter.")).to_be_visible(visible=not names)
    await page.get_by_role("button", name="offline 1").click()
    await expect(shown).to_have_text(["shed"])
    await corral.change("shed", status="healthy")
    await expect(page.get_by_text("No node fits the filter.")).to_be_visible()
    await page.get_by_role("button", name="all 3").click()
    await expect(shown).to_have_text(["barn", "loft", "shed"])


async def test_the_script_draws_a_row_just_as_the_server_does(person: Watched, corral: PageApp, url: str) -> None:
    """Two hands write the same table; whoever changes one must change the other."""
    page = await open_fleet(person, corral, url)
    await corral.put(
        made_node("a", "offline", status_reason="no heartbeat", last_heartbeat=None, devices=(), total_vram=0),
        made_node("b", vram_budget_bytes=int(12.5 * GIB), available_vram=int(3.25 * GIB), available_disk=0, version=""),
        made_node(
            "c", "draining", auth="shared", os="", total_ram=0, available_ram=0, status_reason="asked", bus_down=True
        ),
        made_node("d", devices=made_node("x").devices * 2, ingress_error="http://d does not answer"),
        labels={"b": "2", "a": "1", "d": "4", "c": "", "e": "5"},
    )
    await expect(page.locator("tbody tr")).to_have_count(4)
    by_script = await page.evaluate(_ROWS, "live")
    by_server = await page.evaluate(_ROWS, "fetched")
    assert len(by_server) == 4
    assert by_script == by_server


# Attributes in one order, white space between elements and the ticking text left out: those mean nothing.
_ROWS = """async (which) => {
  const page = which === "live" ? document
    : new DOMParser().parseFromString(await (await fetch("/nodes")).text(), "text/html");
  const plain = (node) => {
    if (node.nodeType === Node.TEXT_NODE) return node.textContent.trim();
    const attributes = [...node.attributes].map((a) => `${a.name}=${a.value}`).sort();
    const inside = node.tagName === "TIME" ? [] : [...node.childNodes].map(plain).filter((part) => part !== "");
    return [node.tagName, attributes, inside];
  };
  return [...page.querySelectorAll("#nodes tbody tr")].map(plain);
}"""


@pytest.mark.long
async def test_a_thousand_nodes_stay_usable(person: Watched, corral: PageApp, url: str) -> None:
    await corral.put(*(made_node(f"node-{number:04}") for number in range(1000)))
    page = await open_fleet(person, corral, url)
    await expect(page.locator("tbody tr")).to_have_count(1000)
    await expect(page.locator("tbody .name").last).to_have_text("node-0999")
    await expect(page.get_by_text("The next ones")).to_have_count(0)
    await page.get_by_role("searchbox").fill("node-0500")
    await corral.change("node-0500", status="draining")
    await expect(page.locator("tbody tr:not([hidden]) .pill")).to_have_text(["draining"])


async def test_without_javascript_there_is_still_a_table(browser: Browser, corral: PageApp, url: str) -> None:
    await corral.put(made_node("barn"), made_node("loft", "pending"))
    async with new_person(browser, java_script_enabled=False) as person:
        page = await person.tab()
        await sign_in(page, url, await corral.key(), "/nodes")
        await expect(page.locator("tbody .name")).to_have_text(["barn", "loft"])
        await expect(page.locator("#attention-line")).to_have_text("1 node waits for approval.")
        for dead in ("Approve loft", "Add a machine", "Actions for barn"):
            await expect(page.get_by_role("button", name=dead)).to_have_count(0)
        await page.get_by_role("button", name="Sign out").click()
        await expect(page.get_by_text("You are signed out.")).to_be_visible()


async def test_on_a_phone_nothing_sticks_out_and_rows_are_rows(browser: Browser, corral: PageApp, url: str) -> None:
    name = "a-machine-with-a-rather-long-name-that-nobody-would-type-" + "x" * 60
    await corral.put(made_node(name, ingress_error="http://" + "very-long-" * 12), made_node("loft", "pending"))
    async with new_person(browser, viewport={"width": 390, "height": 844}, color_scheme="dark") as person:
        page = await open_fleet(person, corral, url)
        await expect(page.get_by_role("row", name="loft").get_by_role("cell").first).to_be_visible()
        assert await page.evaluate("document.documentElement.scrollWidth") <= 390
        await page.goto(f"{url}/docs")
        assert await page.evaluate("document.documentElement.scrollWidth") <= 390
        await person.assert_clean()


async def test_a_tab_nobody_looks_at_gives_its_connection_back(person: Watched, corral: PageApp, url: str) -> None:
    page = await person.tab()
    await page.clock.install()
    await sign_in(page, url, await corral.key(), "/nodes")
    await until(lambda: _followers(corral, 1), "one follower")
    hide = "Object.defineProperty(document, 'hidden', {value: %s, configurable: true}); " + (
        "document.dispatchEvent(new Event('visibilitychange'))"
    )
    await page.evaluate(hide % "true")
    await page.clock.run_for(31_000)
    await until(lambda: _followers(corral, 0), "no follower")
    await corral.put(made_node("barn"))
    await page.evaluate(hide % "false")
    await expect(page.locator("tbody .name")).to_have_text(["barn"])


async def _followers(corral: PageApp, count: int) -> bool:
    return len(corral.feed._subscriptions) == count
