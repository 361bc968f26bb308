"""Debian's chromium, driven by Playwright; every page watched for errors and breaches of the content policy."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import AsyncIterator
from typing import Any

import pytest
from playwright.async_api import Browser, BrowserContext, Locator, Page, async_playwright, expect

_ARGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
_PATIENCE_MS = 30_000  # of everything that waits: a slow machine is no failure
# Runs before the page's own script, so that nothing is missed.
_WATCH = """
window.breaches = [];
document.addEventListener("securitypolicyviolation", (event) => window.breaches.push(
  `${event.violatedDirective}: ${event.blockedURI}`));
"""


class Watched:
    """One person's browser: what went wrong in it, apart from what the network does to a page in these tests."""

    def __init__(self, context: BrowserContext) -> None:
        self.context = context
        self.complaints: list[str] = []

    async def tab(self) -> Page:
        page = await self.context.new_page()
        page.on("pageerror", lambda error: self.complaints.append(f"error: {error}"))
        page.on("console", lambda message: self._heard(message.type, message.text))
        return page

    async def assert_clean(self) -> None:
        for page in self.context.pages:
            self.complaints += await page.evaluate("window.breaches ?? []")
        assert not self.complaints, "\n".join(self.complaints)

    def _heard(self, kind: str, text: str) -> None:
        if kind in ("error", "warning") and not text.startswith("Failed to load resource"):
            self.complaints.append(f"{kind}: {text}")


@contextlib.asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    binary = shutil.which("chromium")
    if binary is None:
        why = "needs Debian's chromium: apt-get install chromium"
        if os.environ.get("CI"):
            pytest.fail(why)
        pytest.skip(why)
    expect.set_options(timeout=_PATIENCE_MS)
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=binary, args=_ARGS)
        try:
            yield browser
        finally:
            await browser.close()


@contextlib.asynccontextmanager
async def new_person(browser: Browser, **options: Any) -> AsyncIterator[Watched]:
    context = await browser.new_context(**options)
    context.set_default_timeout(_PATIENCE_MS)
    await context.add_init_script(_WATCH)
    try:
        yield Watched(context)
    finally:
        await context.close()


async def sign_in(page: Page, url: str, key: str, path: str = "/") -> None:
    await page.goto(f"{url}/login?next={path}")
    await page.get_by_label("API key").fill(key)
    await page.get_by_role("button", name="Sign in").click()


async def open_signed_in(person: Watched, url: str, path: str, key: str) -> Page:
    """A page of the fleet with its script running. `window.sameDocument` stays true until it is loaded anew."""
    page = await person.tab()
    await sign_in(page, url, key, path)
    await page.wait_for_url(f"{url}{path}")
    await expect(page.locator("html")).to_have_class("js")
    await page.evaluate("window.sameDocument = true")
    return page


async def ask_in_playground(page: Page, text: str, *, most: int = 16, timeout: float = 60_000.0) -> Locator:
    """Sends a message and waits for the whole answer. Returns the receipt below it."""
    await page.evaluate(f"document.querySelector('#settings').elements.max_tokens.value = '{most}'")
    count = await page.locator(".receipt").count()
    await page.get_by_label("Message").fill(text)
    await page.get_by_role("button", name="Send").click()
    receipt = page.locator(".receipt").nth(count)
    await expect(receipt).to_contain_text("total", timeout=timeout)
    return receipt
