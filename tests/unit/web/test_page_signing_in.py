"""Sessions from outside: who gets one, what protects it, when it ends."""

from __future__ import annotations

from datetime import timedelta

import pytest

from corral.kit.errors import Unavailable
from corral.kit.secrets import digest
from corral.store.tables import web_sessions
from tests.support.manual_clock import ManualClock
from tests.support.page import PageApp
from tests.unit.web.browsing import Browser


async def test_without_a_session_every_page_leads_to_the_sign_in(browser: Browser) -> None:
    for path, where in (("/", "/login"), ("/docs", "/login?next=/docs")):
        answer = await browser.get(path)
        assert (answer.status_code, answer.headers["location"]) == (303, where)


@pytest.mark.parametrize("role", ["admin", "viewer"])
async def test_a_key_opens_a_session(browser: Browser, page: PageApp, role: str) -> None:
    answer = await browser.sign_in(await page.key(role))
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    cookie = answer.headers["set-cookie"].lower()
    assert cookie.startswith("corral_session=cs_")
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert "path=/;" in cookie + ";"
    assert "secure" not in cookie, "over plain HTTP a secure cookie would never come back"
    assert (await browser.get("/")).status_code == 200


async def test_over_tls_the_cookie_is_secure(browser: Browser, page: PageApp) -> None:
    answer = await browser.sign_in(await page.key(), X_Forwarded_Proto="https")
    assert "; secure" in answer.headers["set-cookie"].lower()


@pytest.mark.parametrize(
    ("role", "sentence"),
    [
        ("", "Enter an API key."),
        ("none", "The API key is not known here."),
        ("gateway", "A key with role gateway cannot sign in; use another key."),
    ],
)
async def test_other_keys_do_not(browser: Browser, page: PageApp, role: str, sentence: str) -> None:
    key = {"": "", "none": "ck_wrong"}.get(role) if role in ("", "none") else await page.key(role)
    answer = await browser.sign_in(key or "")
    assert answer.status_code == 401
    assert sentence in answer.text
    assert not browser.session


async def test_a_key_may_be_pasted_with_its_line_break(browser: Browser, page: PageApp) -> None:
    assert (await browser.sign_in(f"  {await page.key()}\n")).status_code == 303


async def test_a_form_of_somebody_else_is_refused(browser: Browser, page: PageApp) -> None:
    key = await page.key()
    form = await browser.form()
    for fields, headers in (
        ({"key": key}, {}),
        ({"key": key, "form": "0" * 32}, {}),
        ({"key": key, "form": form["form"]}, {"Sec_Fetch_Site": "cross-site"}),
        ({"key": key, "form": form["form"]}, {"Sec_Fetch_Site": "same-site"}),
    ):
        answer = await browser.post("/login", fields, **headers)
        assert answer.status_code == 403
        assert "Please try again" in answer.text
    browser.client.cookies.clear()
    assert (await browser.post("/login", {**form, "key": key})).status_code == 403, "the field without the cookie"
    assert not browser.session


async def test_two_open_tabs_can_both_sign_in(browser: Browser, page: PageApp) -> None:
    first = await browser.form()
    assert await browser.form() == first
    assert (await browser.post("/login", {**first, "key": await page.key()})).status_code == 303


@pytest.mark.parametrize("body", [b"\xff\xfe", b"form=a&" + b"x=1&" * 20, b"", b"key"])
async def test_nonsense_in_the_form_is_refused(browser: Browser, body: bytes) -> None:
    await browser.form()
    answer = await browser.client.post("/login", content=body)
    assert answer.status_code == 403


async def test_a_huge_form_is_refused(browser: Browser) -> None:
    answer = await browser.client.post("/login", content=b"key=" + b"x" * 20_000)
    assert answer.status_code == 413


@pytest.mark.parametrize(
    ("next", "where"),
    [("/docs", "/docs"), ("/", "/"), ("//evil.example", "/"), ("https://evil.example", "/"), ("/\\evil", "/")],
)
async def test_signing_in_leads_only_to_our_own_pages(browser: Browser, page: PageApp, next: str, where: str) -> None:
    form = await browser.form()
    answer = await browser.post("/login", {**form, "key": await page.key(), "next": next})
    assert answer.headers["location"] == where
    assert (await browser.client.get("/login", params={"next": next}, follow_redirects=False)).headers[
        "location"
    ] == where


async def test_the_session_changes_with_each_sign_in_and_the_one_before_ends(browser: Browser) -> None:
    await browser.signed_in()
    before = browser.session
    browser.client.cookies.delete("corral_session")
    form = await browser.form()
    browser.client.cookies.set("corral_session", before, domain="corral.local", path="/")
    answer = await browser.post("/login", {**form, "key": await browser.page.key("viewer")})
    assert answer.status_code == 303
    assert "corral_session=cs_" in answer.headers["set-cookie"]
    browser.client.cookies.clear()
    browser.client.cookies.set("corral_session", before, domain="corral.local", path="/")
    assert (await browser.get("/")).headers["location"] == "/login?why=ended"


async def test_signing_out_ends_the_session_on_the_server(browser: Browser) -> None:
    await browser.signed_in()
    session, csrf = browser.session, await browser.csrf()
    answer = await browser.post("/logout", {"csrf": csrf})
    assert (answer.status_code, answer.headers["location"]) == (303, "/login?why=out")
    assert not browser.session
    assert "You are signed out." in (await browser.get("/login?why=out")).text
    browser.client.cookies.set("corral_session", session, domain="corral.local", path="/")
    assert (await browser.get("/api/me")).status_code == 401


async def test_nobody_else_can_sign_us_out(browser: Browser) -> None:
    await browser.signed_in()
    for fields in ({}, {"csrf": "0" * 32}):
        assert (await browser.post("/logout", fields)).status_code == 403
    assert (await browser.get("/")).status_code == 200
    assert (await browser.client.get("/logout")).status_code == 405, "a link or an image must not do it"


async def test_signing_out_twice_is_no_fault(browser: Browser) -> None:
    assert (await browser.post("/logout", {})).headers["location"] == "/login?why=out"


async def test_an_ended_session_leads_to_a_sentence(browser: Browser, page: PageApp) -> None:
    await browser.signed_in()
    async with page.store.write() as tx:
        await web_sessions.extend(tx, digest(browser.session), await tx.now() - timedelta(seconds=1))
    answer = await browser.get("/")
    assert (answer.status_code, answer.headers["location"]) == (303, "/login?why=ended")
    assert not browser.session, "the dead cookie is taken back"
    assert "Your session has ended. Please sign in again." in (await browser.get("/login?why=ended")).text
    assert (await browser.get("/page/overview")).status_code == 401


async def test_revoking_the_key_ends_its_sessions(browser: Browser, page: PageApp) -> None:
    await page.key(name="another")
    await browser.sign_in(await page.key(name="lost laptop"))
    await page.access.revoke("lost laptop", by="somebody")
    assert (await browser.get("/")).headers["location"] == "/login?why=ended"


async def test_too_many_wrong_keys_have_to_wait(browser: Browser, page: PageApp, door_clock: ManualClock) -> None:
    key, form = await page.key(), await browser.form()
    for _ in range(10):
        assert (await browser.post("/login", {**form, "key": "ck_guess"})).status_code == 401
    for tried in ("ck_guess", key):
        answer = await browser.post("/login", {**form, "key": tried})
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "6")
        assert "Too many tries. Wait 6 s" in answer.text
    door_clock.advance(6)
    assert (await browser.post("/login", {**form, "key": key})).status_code == 303


async def test_the_gateway_says_whose_tries_they_are_and_only_the_gateway(browser: Browser, page: PageApp) -> None:
    gateway, form = await page.key("gateway"), await browser.form()

    async def guess(client: str, key: str) -> int:
        fields = {**form, "key": "ck_guess"}
        return (await browser.post("/login", fields, X_Corral_Client=client, X_Corral_Gateway=key)).status_code

    assert {await guess("192.0.2.1", gateway) for _ in range(10)} == {401}
    assert await guess("192.0.2.1", gateway) == 429
    assert await guess("192.0.2.2", gateway) == 401
    liars = [await guess(f"192.0.2.{number}", "ck_made_up") for number in range(20)]
    assert liars[-1] == 429, "an address one makes up oneself does not count"


@pytest.mark.parametrize(
    ("host", "proto", "warned"),
    [
        ("fleet.example:8080", "http", True),
        ("192.168.1.4:8080", "http", True),
        ("192.168.1.4:8080", "https", False),
        ("localhost:8080", "http", False),
        ("127.0.0.1:8080", "http", False),
        ("[::1]:8080", "http", False),
        ("[fd00::1]:8080", "http", True),
    ],
)
async def test_a_key_in_clear_over_a_network_is_warned_of(
    browser: Browser, host: str, proto: str, warned: bool
) -> None:
    text = (await browser.get("/login", X_Forwarded_Host=host, X_Forwarded_Proto=proto)).text
    assert ("not encrypted" in text) is warned


async def test_a_link_from_another_site_asks_once_more_before_it_gives_up(browser: Browser) -> None:
    """A strict cookie is not sent then, so the page cannot know yet whether somebody is signed in."""
    answer = await browser.get("/", Sec_Fetch_Site="cross-site")
    assert (answer.status_code, answer.headers["refresh"]) == (200, "0; url=/?again")
    assert (await browser.get("/?again", Sec_Fetch_Site="cross-site")).headers["location"] == "/login"


async def test_without_a_database_the_page_says_so_and_tries_again(
    browser: Browser, page: PageApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    await browser.signed_in()

    async def gone(_: str) -> None:
        raise Unavailable("the database is locked")

    monkeypatch.setattr(page.access, "by_session", gone)
    answer = await browser.get("/")
    assert (answer.status_code, answer.headers["refresh"]) == (503, "5")
    assert "the database is locked" in answer.text
    assert answer.headers["content-type"].startswith("text/html")
