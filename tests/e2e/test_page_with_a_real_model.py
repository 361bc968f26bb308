"""The page of a real fleet, from nothing to an answer of a real model in the playground, and what opens and ends it.
`test_models_first_chat.py` has the short form of it, on a fleet that has the model already.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, expect

from tests.support.chromium import Watched, ask_in_playground, new_person, open_signed_in
from tests.support.fleet import PATIENT, Fleet
from tests.support.waiting import promised

MODEL = "smollm2-135m"
pytestmark = [
    pytest.mark.browser,
    pytest.mark.long,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(400),  # an engine and weights come from the package index
]
COLD_MS = 240_000.0


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path_factory.mktemp("page"), **PATIENT)
    try:
        fleet.start()
        fleet.wait_status(fleet.own_node(), "healthy")
        yield fleet
    finally:
        fleet.close()


@pytest_asyncio.fixture(loop_scope="module")
async def person(browser: Browser) -> AsyncIterator[Watched]:
    async with new_person(browser) as person:
        yield person
        await person.assert_clean()


async def status_of(
    page: Page, fleet: Fleet, token: str, header: str = "authorization", path: str = "/v1/models"
) -> int:
    """By the browser's own client, with the session's cookie beside."""
    value = f"Bearer {token}" if header == "authorization" else token
    return (await page.request.get(fleet.url + path, headers={header: value} if token else {})).status


async def test_from_nothing_to_an_answer_in_the_playground(person: Watched, fleet: Fleet) -> None:
    page = await open_signed_in(person, fleet.url, "/playground", fleet.key)
    await page.get_by_role("link", name="Install one").click()
    await page.get_by_role("button", name="Install a model").click()
    await page.get_by_label("From the galleries").fill(MODEL)
    await page.get_by_role("button", name=f"Install {MODEL}", exact=True).click()
    await expect(page.locator("#said")).to_contain_text(f"{MODEL} installed.")
    await page.goto(f"{fleet.url}/playground?model={MODEL}")
    await expect(page.get_by_label("The first model").get_by_text("cold: the first answer loads it")).to_be_visible()
    receipt = await ask_in_playground(page, "What is a corral?", timeout=COLD_MS)
    for words in (f"node {fleet.own_node()}", "loading ", "first token ", "→ 16 tokens", "tokens/s"):
        await expect(receipt).to_contain_text(words)
    again = await ask_in_playground(page, "Name an animal.")
    await expect(again).not_to_contain_text("loading ")
    newest = fleet.api("GET", "/api/requests?limit=1").json()["requests"][0]
    assert (newest["key"], newest["model"], newest["streamed"]) == ("admin", MODEL, True)


async def test_an_answer_is_stopped(person: Watched, fleet: Fleet) -> None:
    page = await open_signed_in(person, fleet.url, "/playground", fleet.key)
    await expect(page.get_by_label("Model", exact=True).first).to_have_value(MODEL)
    await page.get_by_label("Message").fill("Tell me a very long story about horses.")
    await page.get_by_role("button", name="Send").click()
    await expect(page.locator(".said.assistant .text")).not_to_be_empty()
    await page.get_by_role("button", name="Stop").click()
    await expect(page.locator(".said.assistant")).to_contain_text("Stopped.")
    await expect(page.get_by_role("button", name="Send")).to_be_visible()


async def test_a_token_opens_v1_in_authorization_alone_and_ends_at_sign_out(person: Watched, fleet: Fleet) -> None:
    made = fleet.api("POST", "/api/keys", {"name": "app", "role": "inference", "models": [MODEL]}).json()
    page = await open_signed_in(person, fleet.url, "/playground", made["secret"])
    csrf = await page.evaluate("document.body.dataset.csrf")
    answer = await page.request.post(fleet.url + "/api/playground/token", headers={"x-csrf-token": csrf})
    token = (await answer.json())["token"]
    assert await status_of(page, fleet, token) == 200
    assert await status_of(page, fleet, "") == 401, "the cookie alone"
    assert await status_of(page, fleet, token, "x-api-key") == 401
    assert await status_of(page, fleet, token[:-4] + "AAAA") == 401
    assert await status_of(page, fleet, token, path="/api/me") == 401
    assert await status_of(page, fleet, token, path="/api/nodes") == 401
    await ask_in_playground(page, "Hello", most=4)
    newest = fleet.api("GET", "/api/requests?limit=1").json()["requests"][0]
    assert newest["key"] == "app"
    await page.get_by_role("button", name="Sign out").click()
    await page.wait_for_url("**/login?why=out")
    signed_out = time.monotonic()
    while await status_of(page, fleet, token) == 200:
        assert time.monotonic() - signed_out < promised(2), "a token ends within 2 s of the sign-out"
    assert fleet.api("DELETE", "/api/keys/app").status == 204


async def test_a_key_is_created_shown_once_and_revoked(person: Watched, fleet: Fleet) -> None:
    page = await open_signed_in(person, fleet.url, "/fleet/keys", fleet.key)
    await page.get_by_role("button", name="Create a key").click()
    await page.get_by_label("Name", exact=True).fill("<b>shop</b>")
    await page.get_by_label("Requests per minute").fill("60")
    await page.get_by_label("Models, one per line").fill(MODEL)
    await page.get_by_role("button", name="Create", exact=True).click()
    await expect(page.locator("#made-secret")).to_contain_text("ck_")  # it is there, and empty, before the key is made
    secret = await page.locator("#made-secret").text_content()
    assert secret is not None
    assert secret.startswith("ck_")
    row = page.get_by_role("row", name="<b>shop</b>")
    await expect(row).to_contain_text("60 requests/min")
    await expect(row).to_contain_text(MODEL)
    assert await status_of(page, fleet, secret) == 200
    await page.reload()
    assert secret not in await page.content(), "a key is shown once"
    await page.get_by_role("button", name="Revoke <b>shop</b>").click()
    await page.get_by_role("button", name="Revoke", exact=True).click()
    await expect(row).to_contain_text("revoked")
    revoked = time.monotonic()
    while await status_of(page, fleet, secret) == 200:
        assert time.monotonic() - revoked < promised(2), "a revoked key is refused within 2 s"


async def test_a_log_is_followed_filtered_and_downloaded(person: Watched, fleet: Fleet) -> None:
    page = await open_signed_in(person, fleet.url, f"/fleet/logs?name={MODEL}", fleet.key)
    lines = page.locator("#lines p")
    await expect(lines.first).to_be_visible()
    before = await lines.count()
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    assert fleet.api("POST", "/v1/chat/completions", body).status == 200
    await expect(lines.nth(before)).to_be_attached()  # the engine wrote about it
    await page.get_by_label("Filter lines").fill("no line has these words")
    await expect(lines.first).to_be_hidden()
    assert "find=no+line" in page.url
    await page.get_by_label("Filter lines").fill("")
    await expect(lines.first).to_be_visible()
    async with page.expect_download() as download:
        await page.get_by_role("button", name="Download").click()
    assert (await download.value).suggested_filename == f"{MODEL}.log"
