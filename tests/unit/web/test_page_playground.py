"""The playground's calls: who gets a token, for how long, what ends it, and whose receipts are shown."""

from __future__ import annotations

import base64
import json
import os
from typing import Any

import pytest

from corral.bus.jwt import KeyKind, new_seed
from corral.contract.receipts import Receipt, Receipts
from corral.controller.access.bus_issuer import BusEndpoint, BusIssuer
from corral.controller.access.keys import MAX_SESSIONS
from corral.controller.gateways.receipts import ReceiptService
from corral.controller.gateways.view import FleetViews
from corral.gateway.http.auth import authenticate
from corral.gateway.responses import Response
from corral.gateway.view.fleet import Fleet, prepare_fleet
from corral.kit.clock import SystemClock
from tests.support.page import PageApp
from tests.unit.web.browsing import Browser

TOKEN = "/api/playground/token"


def claims(token: str) -> dict[str, Any]:
    assert token.startswith("cp_")
    return dict(json.loads(base64.urlsafe_b64decode(token[3:].partition(".")[0] + "==")))


async def csrf(browser: Browser) -> str:
    return await browser.csrf("/playground")


async def token_of(browser: Browser) -> str:
    answer = await browser.client.post(TOKEN, headers={"x-csrf-token": await csrf(browser)})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["token"])


async def gateway_view(page: PageApp) -> Fleet:
    """The fleet as a gateway sees it after its next read of the view."""
    issuer = BusIssuer(
        BusEndpoint(()),
        SystemClock(),
        account_seed=new_seed(KeyKind.ACCOUNT, os.urandom),
        ttl_s=60,
        install_timeout_s=60,
    )
    return prepare_fleet(await FleetViews(page.store, issuer, page.ingress_tokens, SystemClock()).build())


def is_let_in(fleet: Fleet, token: str) -> bool:
    now = SystemClock().now().timestamp
    return not isinstance(authenticate(fleet, [(b"authorization", b"Bearer " + token.encode())], now), Response)


@pytest.mark.parametrize("role", ["admin", "inference"])
async def test_a_token_names_the_key_and_opens_the_gateway_until_sign_out(
    browser: Browser, page: PageApp, role: str
) -> None:
    await browser.signed_in(role)
    token = await token_of(browser)
    me = (await browser.client.get("/api/me")).json()
    told = claims(token)
    assert (told["sub"], told["aud"]) == (me["key_id"], "playground")
    assert 290 < told["exp"] - SystemClock().now().timestamp() <= 300
    assert browser.session not in token
    assert is_let_in(await gateway_view(page), token)
    await browser.post("/logout", {"csrf": await csrf(browser)})
    assert not is_let_in(await gateway_view(page), token)


async def test_a_revoked_key_ends_its_tokens(browser: Browser, page: PageApp) -> None:
    await page.key("admin", name="another admin")
    key = await page.key("inference", name="app")
    await browser.sign_in(key)
    token = await token_of(browser)
    await page.access.revoke("app", by="")
    assert not is_let_in(await gateway_view(page), token)


async def test_signing_in_as_somebody_else_ends_the_former_tokens(browser: Browser, page: PageApp) -> None:
    form = await browser.form()
    await browser.signed_in("admin")
    former = await token_of(browser)
    answer = await browser.post("/login", {**form, "key": await page.key("inference")})
    assert answer.status_code == 303
    assert not is_let_in(await gateway_view(page), former)
    assert is_let_in(await gateway_view(page), await token_of(browser))


async def test_viewers_get_none(browser: Browser) -> None:
    await browser.signed_in("viewer")
    answer = await browser.client.post(TOKEN, headers={"x-csrf-token": await browser.csrf()})
    assert answer.status_code == 403
    assert (await browser.get("/playground")).headers["location"] == "/"


async def test_a_token_needs_the_csrf_token_of_the_page(browser: Browser) -> None:
    await browser.signed_in()
    for headers in ({}, {"x-csrf-token": ""}, {"x-csrf-token": "0" * 32}):
        assert (await browser.client.post(TOKEN, headers=headers)).status_code == 403


async def test_a_key_gets_no_token(browser: Browser, page: PageApp) -> None:
    answer = await browser.client.post(TOKEN, headers={"authorization": f"Bearer {await page.key()}"})
    assert answer.status_code == 403
    assert "use the API key itself" in answer.json()["error"]["message"]
    assert (await browser.client.post(TOKEN)).status_code == 401


async def test_a_token_is_no_key_and_no_session(browser: Browser) -> None:
    await browser.signed_in()
    token = await token_of(browser)
    browser.client.cookies.clear()
    for headers in ({"authorization": f"Bearer {token}"}, {"x-api-key": token}, {"cookie": f"corral_session={token}"}):
        for path in ("/api/me", "/api/nodes", "/api/keys", "/api/playground/models", "/internal/view"):
            assert (await browser.client.get(path, headers=headers)).status_code == 401, (path, headers)
    assert (await browser.client.post("/login", data={**await browser.form(), "key": token})).status_code == 401


async def test_an_inference_key_sees_the_playground_and_nothing_of_the_fleet(browser: Browser) -> None:
    await browser.signed_in("inference")
    page = await browser.get("/playground")
    assert page.status_code == 200
    assert 'id="facts"' not in page.text
    for path in ("/", "/fleet/models", "/fleet/backends", "/fleet/operations", "/fleet/requests"):
        assert (await browser.get(path)).headers["location"] == "/playground", path
    for path in (
        "/api/nodes",
        "/api/keys",
        "/api/events",
        "/api/requests",
        "/api/operations",
        "/page/overview",
        "/page/models",
        "/page/requests",
        "/page/definition?model=x",
        "/page/why?model=x",
    ):
        assert (await browser.get(path)).status_code == 403, path


async def test_models_are_those_that_the_key_may_use(browser: Browser, page: PageApp) -> None:
    admin = {"authorization": f"Bearer {await page.key()}"}
    for definition in (
        {"name": "talker", "backend": "mock"},
        {"name": "secret", "backend": "mock"},
        {"name": "vectors", "backend": "mock", "embeddings": True},
        {"name": "judge", "backend": "mock", "known_usecases": ["FLAG_RERANK"]},
        {"name": "seer", "backend": "mock", "known_usecases": ["chat", "vision"]},
        {"name": "off", "backend": "mock", "disabled": True},
        {"name": "short", "alias": "vectors"},
    ):
        made = await browser.client.post("/api/models", json={"definition": definition}, headers=admin)
        assert made.status_code == 201, made.text
    await browser.sign_in(await page.key("inference", models=("talker", "vectors", "judge", "seer", "off", "short")))
    found = {each["name"]: each for each in (await browser.client.get("/api/playground/models")).json()}
    assert {name: each["kinds"] for name, each in found.items()} == {
        "talker": ["chat"],
        "vectors": ["embeddings"],
        "short": ["embeddings"],
        "judge": ["rerank"],
        "seer": ["chat"],
    }
    assert [name for name, each in found.items() if each["images"]] == ["seer"]


async def test_a_receipt_is_shown_to_its_own_key_only(browser: Browser, page: PageApp) -> None:
    own = await page.key("inference", name="own")
    await browser.sign_in(own)
    key_id = (await browser.client.get("/api/me")).json()["key_id"]
    now = SystemClock().now().timestamp()
    told = [
        Receipt(id="mine", at=now, key_id=key_id, model="m", path="/v1/chat/completions", status=200, total_ms=5),
        Receipt(id="theirs", at=now, key_id="other", model="m", path="/v1/chat/completions", status=200),
    ]
    await ReceiptService(page.store, SystemClock()).take(Receipts(receipts=tuple(told)))
    assert (await browser.client.get("/api/playground/requests/mine")).json()["key"] == "own"
    assert (await browser.client.get("/api/playground/requests/theirs")).json() is None
    assert (await browser.client.get("/api/playground/requests/nobodys?wait_s=0.3")).json() is None


async def test_a_key_that_signs_in_again_and_again_has_a_bounded_number_of_sessions(page: PageApp) -> None:
    key = await page.key("inference")
    first, _ = await page.access.open_session(key)
    last = ""
    for _ in range(MAX_SESSIONS):
        last, _ = await page.access.open_session(key)
    assert len((await gateway_view(page)).sessions) == MAX_SESSIONS
    assert (await page.access.by_session(last)).role == "inference"
    with pytest.raises(Exception, match="the session has ended"):
        await page.access.by_session(first)


async def test_a_key_sees_its_own_usage_and_no_others(browser: Browser, page: PageApp) -> None:
    await browser.sign_in(await page.key("inference", name="own"))
    assert "You have used no model yet." in (await browser.get("/usage")).text
    key_id = (await browser.client.get("/api/me")).json()["key_id"]
    await page.key("inference", name=key_id)  # named like the other's id
    admin = {"authorization": f"Bearer {await page.key()}"}
    keys = (await browser.client.get("/api/keys", headers=admin)).json()
    namesake = next(key["id"] for key in keys if key["name"] == key_id)
    now = SystemClock().now().timestamp()
    told = [
        Receipt(id="a", at=now, key_id=key_id, model="mine", path="/v1/embeddings", status=200, prompt_tokens=1234),
        Receipt(id="b", at=now, key_id=namesake, model="theirs", path="/v1/embeddings", status=200),
    ]
    await ReceiptService(page.store, SystemClock()).take(Receipts(receipts=tuple(told)))
    text = (await browser.get("/usage")).text
    assert "mine" in text
    assert "<dd>1,234</dd>" in text
    assert "theirs" not in text


async def test_viewers_have_no_usage_of_models(browser: Browser) -> None:
    await browser.signed_in("viewer")
    assert (await browser.get("/usage")).headers["location"] == "/"
