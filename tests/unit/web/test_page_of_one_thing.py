"""The pages of one node, of one model, and of what a search finds: roles, names from outside, what is not there."""

from __future__ import annotations

import re
from datetime import UTC, datetime

import pytest

from corral.contract.catalogue import EditModel, InstallModel
from corral.store.tables import replicas
from tests.integration.store.rows import a_replica
from tests.support.model_catalogue import models_of
from tests.support.page import PageApp, made_node
from tests.unit.web.browsing import Browser
from tests.unit.web.test_page_content import ESCAPED, NASTY, POLICY


@pytest.fixture
async def fleet(page: PageApp) -> PageApp:
    barn = made_node("barn")
    await page.put(barn, labels={"tier": "fast"})
    definition = {"name": "org/m", "backend": "llama-cpp", "tags": ["chat"], "description": NASTY}
    await models_of(page.store, page.feed).install(InstallModel(definition=definition))
    async with page.store.write() as tx:
        await replicas.put(tx, [a_replica(barn.id, "org/m", memory_bytes=2**30, created_at=datetime.now(UTC))])
    return page


@pytest.mark.parametrize(
    "path",
    ["/nodes/barn", "/page/node/barn", "/models/org/m", "/page/model/org/m", "/search?q=m", "/page/search?q=m"],
)
async def test_pages_carry_the_policy_and_a_viewer_changes_nothing(browser: Browser, fleet: PageApp, path: str) -> None:
    assert (await browser.get(path)).status_code in (303, 401)
    await browser.signed_in("viewer")
    answer = await browser.get(path)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-security-policy"] == POLICY
    assert set(re.findall(r'data-act="([\w-]+)"', answer.text)) <= {"definition"}
    assert '<form id="budget-form"' not in answer.text
    assert "<img src=x" not in answer.text


async def test_a_node_page_shows_what_is_on_it_and_what_draining_costs(browser: Browser, fleet: PageApp) -> None:
    await fleet.nodes.drain("barn")
    await fleet.nodes.resume("barn")
    await browser.signed_in()
    text = (await browser.get("/nodes/barn")).text
    assert "Ready nowhere else: org/m; requests for it load again." in text
    assert 'href="/models/org/m#replica-' in text
    assert "<li>tier=fast</li>" in text
    history = re.findall(r'<li data-key="[^"]+"><span class="pill (\w+)">', text[text.index('class="history"') :])
    assert history == ["healthy", "draining"], "the newest first"
    assert 'href="/nodes" aria-current="page"' in text


async def test_a_model_page_shows_each_change_and_how_to_call_it(browser: Browser, fleet: PageApp) -> None:
    definition = {"name": "org/m", "backend": "llama-cpp", "context_size": 8192}
    await models_of(fleet.store, fleet.feed).edit("org/m", EditModel(definition=definition))
    await browser.signed_in()
    text = (await browser.get("/models/org/m")).text
    assert '<span class="added">+context_size: 8192\n</span>' in text
    assert ESCAPED in text, "what was removed is text"
    assert "curl http://corral.local/v1/chat/completions" in text
    assert 'data-act="edit"' in text
    assert '<a href="/nodes/barn">barn</a>' in text


async def test_what_is_not_there_is_said(browser: Browser, fleet: PageApp) -> None:
    await browser.signed_in()
    for path, words in (("/nodes/barm", "barn"), ("/models/org/n", "org/m")):
        answer = await browser.get(path)
        assert answer.status_code == 404
        assert words in answer.text, "similar names"
    assert "Nothing is called “xyzzy”." in (await browser.get("/search?q=xyzzy")).text
    assert (await browser.get("/page/node/barm")).status_code == 404


async def test_a_sign_in_leads_back_to_the_node(browser: Browser, fleet: PageApp) -> None:
    answer = await browser.get("/nodes/barn?range=24h")
    assert answer.headers["location"] == "/login?next=/nodes/barn%3Frange%3D24h"


async def test_search_finds_by_name_label_and_tag(browser: Browser, fleet: PageApp) -> None:
    await browser.signed_in("viewer")
    for query, href in (("bar", "/nodes/barn"), ("tier=fast", "/nodes/barn"), ("chat", "/models/org/m")):
        for path in ("/search", "/page/search"):
            assert f'href="{href}"' in (await browser.get(f"{path}?q={query}")).text


@pytest.mark.parametrize("path", ["/", "/nodes/barn", "/models/org/m"])
async def test_a_range_stands_in_the_address(browser: Browser, fleet: PageApp, path: str) -> None:
    await browser.signed_in("viewer")
    text = (await browser.get(f"{path}?range=7d")).text
    assert f'href="{path}?range=7d" aria-current="true"' in text
    assert re.search(r'data-part="/page/[^"]*\?range=7d"', text)
    assert f'href="{path}?range=1h" aria-current="true"' in (await browser.get(f"{path}?range=2y")).text


async def test_a_node_page_keeps_a_warning_and_its_fix_apart(browser: Browser, page: PageApp) -> None:
    await page.put(made_node("barn", backend_user_warning="backends run as root", backend_user_fix="chmod o+x /root"))
    await browser.signed_in("viewer")
    text = (await browser.get("/nodes/barn")).text
    assert "backends run as root. On that machine: chmod o+x /root" in text


@pytest.mark.parametrize(
    ("path", "kind", "name"), [("/models/org/gone", "model", "org/gone"), ("/nodes/gone", "node", "gone")]
)
async def test_what_was_deleted_has_a_page_that_leads_on(
    browser: Browser, fleet: PageApp, path: str, kind: str, name: str
) -> None:
    """Receipts name models and nodes for as long as they are kept."""
    await browser.signed_in("viewer")
    answer = await browser.get(path)
    assert answer.status_code == 404
    assert f"There is no {kind} {name}" in answer.text
    assert f'href="/fleet/requests?{kind}=' in answer.text
    hostile = (await browser.get("/models/%3Cimg%20src=x%3E")).text
    assert "<img src=x" not in hostile
