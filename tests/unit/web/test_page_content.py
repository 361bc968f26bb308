"""What the pages hold: headers, escaping, roles, the table without a script, static files, the reference."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from importlib import resources

import pytest

from corral.contract.catalogue import InstallModel
from corral.controller.access.gateway_trust import GatewayTrust
from corral.controller.web.assets import Assets
from corral.kit.certificates import Ca, fingerprint, make_ca
from tests.support.model_catalogue import models_of
from tests.support.page import PageApp, made_node
from tests.unit.web.browsing import Browser

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
NASTY = "<img src=x onerror=alert(1)>\"'&"
ESCAPED = "&lt;img src=x onerror=alert(1)&gt;&#34;&#39;&amp;"


async def test_every_page_carries_the_safe_headers(browser: Browser) -> None:
    await browser.signed_in()
    for method, path, status in (
        ("GET", "/", 200),
        ("GET", "/nodes", 200),
        ("GET", "/docs", 200),
        ("GET", "/login", 303),
        ("GET", "/fleet/backends", 200),
        ("GET", "/fleet/models", 200),
        ("GET", "/fleet/operations", 200),
        ("GET", "/fleet/requests", 200),
        ("GET", "/page/overview", 200),
        ("GET", "/page/nodes", 200),
        ("GET", "/page/backends", 200),
        ("GET", "/page/models", 200),
        ("GET", "/page/operations", 200),
        ("GET", "/page/work", 200),
        ("GET", "/page/requests", 200),
        ("POST", "/login", 403),
        ("POST", "/logout", 403),
    ):
        answer = await (browser.get(path) if method == "GET" else browser.post(path, {}))
        assert answer.status_code == status, path
        assert answer.headers["content-security-policy"] == POLICY, path
        assert answer.headers["x-content-type-options"] == "nosniff", path
        assert answer.headers["referrer-policy"] == "no-referrer", path
        assert answer.headers["cache-control"] == "no-store", path


def test_no_template_has_inline_script_or_style() -> None:
    for template in (resources.files("corral.controller.web") / "templates").iterdir():
        text = re.sub(r"{#.*?#}", "", template.read_text(), flags=re.DOTALL)
        assert not re.search(r"\sstyle=|\son\w+=|<style|javascript:", text), template.name
        for script in re.findall(r"<script[^>]*>", text):
            assert "src=" in script, template.name


def test_no_script_makes_markup_of_text() -> None:
    scripts = [
        each for each in (resources.files("corral.controller.web") / "static").iterdir() if each.name[-3:] == ".js"
    ]
    assert len(scripts) > 5
    for script in scripts:
        markup = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|Function\("
        assert not re.search(markup, script.read_text()), script.name


async def test_names_labels_and_reasons_from_outside_are_text(browser: Browser, page: PageApp) -> None:
    await page.put(
        made_node(NASTY, status_reason=NASTY, ingress_error=NASTY, version=NASTY, capability=NASTY, os=NASTY),
        labels={NASTY: NASTY},
    )
    await page.put(made_node(NASTY + "2", "pending", ingress_url=NASTY))
    await browser.signed_in()
    for path in ("/nodes", "/page/nodes"):
        text = (await browser.get(path)).text
        assert "<img src=x" not in text
        assert text.count(ESCAPED) >= 3
        assert not re.search(r'="[^"]*alert\(1\)>', text), "inside attributes too"


async def test_a_key_with_a_nasty_name_is_text_too(browser: Browser, page: PageApp) -> None:
    await browser.sign_in(await page.key(name=NASTY))
    assert ESCAPED in (await browser.get("/")).text


async def test_the_table_is_there_without_a_script(browser: Browser, page: PageApp) -> None:
    await page.put(made_node("barn"), labels={"tier": "fast"})
    await page.put(made_node("attic", "draining", status_reason="asked by a person"))
    await browser.signed_in()
    text = (await browser.get("/nodes")).text
    assert text.index(">attic<") < text.index(">barn<"), "in name order"
    for expected in (
        '<span data-f="pill" class="pill draining" title="asked by a person">draining</span>',
        '<meter data-f="vram" min="0" max="25769803776" value="4294967296" aria-hidden="true"></meter>',
        '<li title="tier=fast">tier=fast</li>',
        "No problems: 1 healthy and 1 draining.",
        "bus connected",
        "SQLite",
    ):
        assert expected in text


@pytest.mark.parametrize("path", ["/fleet/models", "/fleet/backends", "/fleet/operations", "/fleet/requests"])
async def test_pages_of_the_fleet_are_for_those_who_are_signed_in(browser: Browser, path: str) -> None:
    answer = await browser.get(path)
    assert (answer.status_code, answer.headers["location"]) == (303, f"/login?next={path}")
    away = await browser.get(path, Sec_Fetch_Site="cross-site")
    assert away.headers["refresh"] == f"0; url={path}?again"
    back = await browser.post("/login", {**await browser.form(), "next": path, "key": await browser.page.key("viewer")})
    assert back.headers["location"] == path
    text = (await browser.get(path)).text
    assert "data-act" not in text, "a viewer has no levers"
    assert f'href="{path}" aria-current="page"' in text


async def test_a_viewer_sees_everything_and_no_buttons(browser: Browser, page: PageApp) -> None:
    await page.put(made_node("barn"), made_node("attic", "pending"))
    await browser.signed_in("viewer")
    for path in ("/", "/page/overview", "/nodes", "/page/nodes"):
        text = (await browser.get(path)).text
        assert "attic" in text
        assert "1 node waits for approval." in text
        assert "data-act" not in text
        assert "Approve<" not in text
    assert 'id="join"' not in (await browser.get("/nodes")).text


async def test_what_a_definition_says_is_text_and_a_viewer_may_only_read_it(browser: Browser, page: PageApp) -> None:
    definition = {"name": "org/m", "backend": "llama-cpp", "description": NASTY, "tags": [NASTY]}
    await models_of(page.store, page.feed).install(InstallModel(definition=definition))
    await browser.signed_in("viewer")
    for path in ("/fleet/models", "/page/models", "/page/models?find=ORG"):
        text = (await browser.get(path)).text
        assert ESCAPED in text
        assert "<img src=x" not in text
        assert set(re.findall(r'data-act="([\w-]+)"', text)) == {"use", "why", "files", "definition"}, (
            "nothing that changes anything"
        )
    assert "No model fits." in (await browser.get("/page/models?find=nobody")).text
    told = (await browser.get("/page/definition?model=org/m")).json()
    assert told["text"].startswith("name: org/m\n")
    assert (told["row_version"], told["file"]) == (1, "")
    missing = await browser.get("/page/definition?model=orgm")
    assert (missing.status_code, missing.json()["error"]["type"]) == (404, "not_found")


async def test_an_admin_can_approve_one_and_all(browser: Browser, page: PageApp) -> None:
    await page.put(made_node("barn", "pending"))
    await browser.signed_in()
    text = (await browser.get("/")).text
    assert text.count('data-act="approve" data-id=') == 1
    assert "Approve all" not in text
    await page.put(made_node("attic", "pending"))
    assert "Approve all 2" in (await browser.get("/page/overview")).text


async def test_a_large_fleet_is_drawn_in_pieces(browser: Browser, page: PageApp) -> None:
    await page.put(*(made_node(f"node-{number:03}") for number in range(450)))
    await browser.signed_in()
    seen, after = [], ""
    for _ in range(3):
        text = (await browser.get(f"/nodes{after}")).text
        seen += re.findall(r'class="name" href="[^"]+">(node-\d+)<', text)
        link = re.search(r'href="/nodes(\?after=[^"]+)"', text)
        after = link.group(1) if link else ""
    assert seen == [f"node-{number:03}" for number in range(450)]
    assert not after
    assert "all <b>450</b>" in text


async def test_static_files_may_be_kept_for_ever_under_their_own_name_only(browser: Browser) -> None:
    page = (await browser.get("/login")).text
    found = re.search(r'href="(/static/corral\.css\?v=\w+)"', page)
    assert found
    kept = await browser.get(found.group(1))
    assert kept.headers["content-type"].startswith("text/css")
    assert kept.headers["cache-control"] == "public, max-age=31536000, immutable"
    assert kept.headers["x-content-type-options"] == "nosniff"
    other = await browser.get("/static/corral.css?v=0123456789abcdef")
    assert other.headers["cache-control"] == "no-cache", "another version's name must not be filled with our content"
    again = await browser.get("/static/corral.css", If_None_Match=other.headers["etag"])
    assert (again.status_code, again.content) == (304, b"")


def test_a_script_names_those_it_imports_by_content_too() -> None:
    files = {
        "a.js": b'import { b } from "./b.js";',
        "b.js": b'import {\n  c,\n} from "./c.js";',
        "c.js": b"export const c = 1;",
    }
    before, after = Assets(files), Assets(files | {"c.js": b"export const c = 2;"})
    first = before.find("a.js")
    assert first
    assert first.content.decode() == f'import {{ b }} from ".{before.url("b.js").removeprefix("/static")}";'
    assert before.url("a.js") != after.url("a.js"), "whoever imports something that changed has changed"


@pytest.mark.parametrize(("name", "kind"), [("nodes.js", "text/javascript"), ("mark.svg", "image/svg+xml")])
async def test_static_files_have_their_types(browser: Browser, name: str, kind: str) -> None:
    assert (await browser.get(f"/static/{name}")).headers["content-type"].startswith(kind)


@pytest.mark.parametrize(
    "path", ["/static/nothing.js", "/static/..%2froutes.py", "/static/%2e%2e/routes.py", "/static/"]
)
async def test_nothing_else_is_served(browser: Browser, path: str) -> None:
    assert (await browser.get(path)).status_code in (400, 404)


async def test_the_reference_says_who_may_what(browser: Browser) -> None:
    await browser.signed_in("viewer")
    text = (await browser.get("/docs", Host="fleet.example:8080")).text
    assert "<script" not in text
    for method, path, role in (
        ("GET", "/api/nodes", "viewer or admin"),
        ("POST", "/api/nodes/{node}/approve", "admin"),
        ("POST", "/api/tokens", "admin"),
        ("GET", "/api/me", "any key"),
        ("GET", "/ca.pem", "nobody: open"),
        ("POST", "/api/node/register", "a join token"),
        ("POST", "/api/node/{node_id}/heartbeat", "the node&#39;s own token"),
    ):
        article = re.search(
            rf"<article [^>]*>\s*<h3>[^\n]*{method}</span> <code>{re.escape(path)}</code>.*?</article>", text, re.DOTALL
        )
        assert article, path
        assert f"<dt>Who</dt><dd>{role}</dd>" in article.group(0), path
    assert '<a href="#shape-NodeView">NodeView</a>' in text
    assert '<article id="shape-NodeView">' in text
    assert "http://fleet.example:8080/api/nodes" in text
    for link in re.findall(r'href="#([^"]+)"', text):
        assert f'id="{link}"' in text, "every link leads somewhere"


async def test_the_reference_can_be_read_with_a_key(browser: Browser, page: PageApp) -> None:
    answer = await browser.get("/docs", Authorization=f"Bearer {await page.key('viewer')}")
    assert answer.status_code == 200
    assert "Sign out" not in answer.text


async def test_how_to_use_a_model_says_how_to_trust_the_fleet_where_it_has_a_ca(
    browser: Browser, page: PageApp
) -> None:
    await browser.signed_in("viewer")
    assert "ca.pem" not in (await browser.get("/fleet/models")).text
    made = make_ca("a fleet", datetime.now(UTC))
    page.app.state.trust = GatewayTrust(Ca(made.certificate_pem, made.key_pem))
    text = (await browser.get("/fleet/models")).text
    assert fingerprint(made.certificate_pem) in text
    assert 'href="/ca.pem"' in text
    assert 'export SSL_CERT_FILE="$PWD/ca.pem"' in text
