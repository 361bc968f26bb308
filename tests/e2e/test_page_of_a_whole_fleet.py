"""The page through the gateway, on a fleet started with `corral up`: join, approve, install, a controller that dies,
TLS."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import ssl
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.async_api import expect

from tests.support.chromium import chromium, new_person, sign_in
from tests.support.fleet import Fleet
from tests.support.waiting import wait_for

pytestmark = pytest.mark.browser


@pytest.fixture
def fleet(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path, *getattr(request, "param", ()))
    try:
        yield fleet
    finally:
        fleet.close()


async def test_a_machine_joins_gets_a_backend_on_the_page_and_outlives_a_controller(fleet: Fleet) -> None:
    await asyncio.to_thread(fleet.start)
    async with chromium() as browser, new_person(browser) as person:
        page = await person.tab()
        await sign_in(page, fleet.url, fleet.key)
        await page.get_by_role("link", name="Nodes", exact=True).click()
        await expect(page.locator("tbody .pill")).to_have_text(["healthy"])
        await expect(page.get_by_text("bus connected")).to_be_visible()

        await asyncio.to_thread(lambda: fleet.join("barn", token=fleet.token()))
        barn = page.get_by_role("row", name="barn")
        await expect(barn.locator(".pill")).to_have_text("pending")
        await page.get_by_role("button", name="Approve barn").click()
        await expect(barn.locator(".pill")).to_have_text("healthy")

        await page.get_by_role("link", name="Backends", exact=True).click()
        await page.get_by_role("button", name="Install a backend").click()
        await page.get_by_role("button", name="Install… mock", exact=True).click()
        ask = page.get_by_role("dialog", name="Install mock?")
        await expect(ask.get_by_role("status")).to_contain_text("of 2 nodes")
        await ask.get_by_role("button", name="Install", exact=True).click()
        await expect(page.get_by_role("row", name="mock").get_by_role("rowheader")).to_contain_text("on 2 of 2 nodes: ")
        await page.get_by_role("link", name="Operations", exact=True).click()
        await expect(page.locator("#history")).to_contain_text("install mock done")
        await page.get_by_role("link", name="Nodes", exact=True).click()
        await expect(barn.locator(".pill")).to_have_text("healthy")

        with fleet.restarts_suspended():
            os.kill(fleet.child_pid("controller"), signal.SIGKILL)
            await expect(page.get_by_text("Connection lost, reconnecting…")).to_be_visible()
        await expect(page.get_by_text("Connection lost")).to_be_hidden()
        await expect(barn.locator(".pill")).to_have_text("healthy")

        await page.get_by_role("button", name="Sign out").click()
        await expect(page.get_by_text("You are signed out.")).to_be_visible()
        await person.assert_clean()


@pytest.mark.parametrize("fleet", [("--lan",)], indirect=True)
async def test_over_tls_the_session_travels_encrypted_only(fleet: Fleet) -> None:
    url = f"https://127.0.0.1:{fleet.port}"
    fleet.start(wait=False)
    await asyncio.to_thread(wait_for, lambda: _answers(f"{url}/controller/readyz"), "ready fleet", 60.0)
    async with chromium() as browser, new_person(browser, ignore_https_errors=True) as person:
        page = await person.tab()
        await sign_in(page, url, fleet.key)
        await page.get_by_role("link", name="Nodes", exact=True).click()
        await expect(page.get_by_role("heading", name="Nodes")).to_be_visible()
        session = next(c for c in await person.context.cookies() if c["name"] == "corral_session")
        assert (session["secure"], session["httpOnly"], session["sameSite"]) == (True, True, "Strict")
        await page.get_by_role("button", name="Add a machine").click()
        await page.get_by_role("button", name="Make a join line").click()
        await expect(page.locator("#join-command")).to_have_text(
            re.compile(rf"^printf %s cj_\w+ \| sh -c 'u=https://[\d.]+:{fleet.port};")
        )
        await expect(page.get_by_text("--ca sha256:")).to_be_visible()
        await person.assert_clean()


def _answers(url: str) -> bool:
    """Whoever it is: whom to trust is tested elsewhere."""
    anybody = ssl.create_default_context()
    anybody.check_hostname, anybody.verify_mode = False, ssl.CERT_NONE
    with urllib.request.urlopen(url, timeout=30, context=anybody) as answer:
        return bool(answer.status == 200)
