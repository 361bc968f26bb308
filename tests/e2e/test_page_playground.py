"""The playground in a real browser: the Markdown of hostile answers, and a conversation with a scripted gateway.

The answers of `/v1` are scripted in the browser; `test_page_with_a_real_model.py` has a real fleet and a real model.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, Route, expect

from tests.support.chromium import Watched, new_person, open_signed_in
from tests.support.page import PageApp, open_page_app, served
from tests.support.processes import free_port
from tests.support.waiting import promised

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="module")]

RENDER = """async (text) => {
  const { markdown } = await import("/static/markdown.js");
  const box = document.createElement("div");
  box.append(markdown(text));
  document.body.append(box);
  const all = [...box.querySelectorAll("*")];
  const found = {
    html: box.innerHTML, tags: [...new Set(all.map((each) => each.localName))],
    links: all.filter((each) => each.localName === "a").map((each) => each.getAttribute("href")),
    handlers: all.flatMap((each) => each.getAttributeNames()).filter((name) => /^on|^style$|^src/.test(name)),
  };
  box.remove();
  return found;
}"""
HARMLESS = {
    *("p", "a", "b", "br", "hr", "em", "strong", "s", "code", "pre", "div", "span", "button", "blockquote"),
    *("ul", "ol", "li", "table", "thead", "tbody", "tr", "th", "td"),
}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def app(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[PageApp, str]]:
    async with open_page_app(tmp_path_factory.mktemp("page")) as page, served(page, free_port()) as url:
        yield page, url
        page.feed.end()


@pytest_asyncio.fixture(loop_scope="module")
async def person(browser: Browser) -> AsyncIterator[Watched]:
    async with new_person(browser) as person:
        yield person
        await person.assert_clean()


async def open_playground(person: Watched, app: tuple[PageApp, str], path: str = "/playground", **key: Any) -> Page:
    return await open_signed_in(person, app[1], path, await app[0].key(key.pop("role", "inference"), **key))


HOSTILE = [
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "<svg onload=alert(1)>",
    "<iframe src=javascript:alert(1)></iframe>",
    "[click](javascript:alert(1))",
    "[click](JaVaScRiPt:alert(1))",
    "[click](java\tscript:alert(1))",
    "[click](\x01javascript:alert(1))",
    "[click](&#106;avascript:alert(1))",
    "[click](data:text/html,<script>alert(1)</script>)",
    "[click](vbscript:x)",
    "[click](//evil.example)",
    "[click](/logout)",
    "[click](file:///etc/passwd)",
    '[click](https://good.example" onmouseover="alert(1))',
    "[x](https://ok.example'onclick='alert(1))",
    "![alt](https://evil.example/?leak=1)",
    "![alt](javascript:alert(1))",
    "<javascript:alert(1)>",
    "`<b onclick=alert(1)>`",
    "```<img onerror=alert(1)>\n<script>alert(1)</script>\n```",
    "# <img src=x onerror=alert(1)>",
    "| <img src=x onerror=alert(1)> | b |\n|---|---|\n| <script>1</script> | [x](javascript:1) |",
    "> - <svg/onload=alert(1)>",
    "[<img src=x onerror=alert(1)>](https://ok.example)",
    "[a]: javascript:alert(1)\n[a]",
]


async def test_no_answer_of_a_model_becomes_markup(person: Watched, app: tuple[PageApp, str]) -> None:
    page = await open_playground(person, app)
    for text in HOSTILE:
        found = await page.evaluate(RENDER, text)
        assert set(found["tags"]) <= HARMLESS, (text, found["html"])
        assert not found["handlers"], (text, found["html"])
        assert all(link.startswith(("http://", "https://")) for link in found["links"]), (text, found["links"])
        assert not any("evil" in link and "leak" not in link for link in found["links"]), (text, found["links"])


async def test_deep_and_long_answers_are_drawn_quickly(person: Watched, app: tuple[PageApp, str]) -> None:
    page = await open_playground(person, app)
    n = 20_000
    repeated = (">", "- ", "*", "**a", "[", "[](", "`", "_a_", "(", "https://", "# ", "\\", "1. ", "~~", "a*b_c`d[")
    stairs = "\n".join(" " * min(depth, 60) + "- x" for depth in range(2_000))
    for text in (*(each * n for each in repeated), "> " * n + "x", "|" * n + "\n|-|", stairs, "```\n" * 2_000):
        began = time.monotonic()
        found = await page.evaluate(RENDER, text)
        assert time.monotonic() - began < promised(5), text[:20]
        assert set(found["tags"]) <= HARMLESS


async def test_markdown_becomes_elements(person: Watched, app: tuple[PageApp, str]) -> None:
    page = await open_playground(person, app)
    for text, html in (
        ("a **b** *c* ~~d~~ `e < f`", "<p>a <strong>b</strong> <em>c</em> <s>d</s> <code>e &lt; f</code></p>"),
        ("snake_case_name 2 * 3 * 4", "<p>snake_case_name 2 * 3 * 4</p>"),
        ("one\ntwo\n\nthree", "<p>one<br>two</p><p>three</p>"),
        ("- a\n- b\n  - c", "<ul><li><p>a</p></li><li><p>b</p><ul><li><p>c</p></li></ul></li></ul>"),
        ("3. a\n4. b", '<ol start="3"><li><p>a</p></li><li><p>b</p></li></ol>'),
        ("> a\n> b", "<blockquote><p>a<br>b</p></blockquote>"),
        ("---", "<hr>"),
        ("\\*a\\*", "<p>*a*</p>"),
        ("**unfinished", "<p>**unfinished</p>"),
    ):
        assert (await page.evaluate(RENDER, text))["html"] == html


class Models:
    """`/v1` as a gateway serves it, scripted; keeps what the page sent."""

    def __init__(self, *pieces: dict[str, Any]) -> None:
        self.pieces = pieces
        self.asked: list[tuple[dict[str, str], dict[str, Any]]] = []

    async def route(self, route: Route) -> None:
        self.asked.append((await route.request.all_headers(), json.loads(route.request.post_data or "{}")))
        events = [json.dumps({"choices": [{"delta": piece}]}) for piece in self.pieces]
        body = "".join(f"data: {event}\n\n" for event in (*events, "[DONE]"))
        await route.fulfill(status=200, headers={"content-type": "text/event-stream", "x-request-id": ""}, body=body)


async def install(app: tuple[PageApp, str], page: Page, *names: str) -> None:
    key = await app[0].key()
    for name in names:
        made = await page.request.post(
            f"{app[1]}/api/models",
            data={"definition": {"name": name, "backend": "mock"}},
            headers={"authorization": f"Bearer {key}"},
        )
        assert made.ok, await made.text()


async def test_a_conversation_of_two_models(person: Watched, app: tuple[PageApp, str]) -> None:
    page = await open_playground(person, app)
    await expect(page.get_by_text("No model for chat that you may use is installed.")).to_be_visible()
    await install(app, page, "one", "two")
    models = Models(
        {"reasoning_content": "hmm"},
        {"content": "Hello **you** <img src=x onerror=alert(1)>"},
        {"tool_calls": [{"index": 0, "function": {"name": "weather", "arguments": '{"city":'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '"Bern"}'}}]},
    )
    await page.route("**/v1/chat/completions", models.route)
    await page.goto(f"{app[1]}/playground?model=one&beside=two")
    await expect(page.get_by_label("Model beside it")).to_have_value("two")
    await page.get_by_text("Parameters").click()
    await page.get_by_label("System prompt").fill("Be short.")
    await page.get_by_label("Temperature").fill("0.2")
    png = b"\x89PNG\r\n\x1a\n" + b"0" * 20
    await page.locator("#image").set_input_files({"name": "a.png", "mimeType": "image/png", "buffer": png})
    await expect(page.locator("#attached li")).to_have_count(1)
    await page.get_by_label("Message").fill("What is here?")
    await page.get_by_label("Message").press("Enter")
    for name in ("Conversation", "Conversation beside it"):
        log = page.get_by_role("log", name=name, exact=True)
        await expect(log.locator("strong")).to_have_text("you")
        await expect(log).to_contain_text("<img src=x onerror=alert(1)>")
        await expect(log).to_contain_text("tool call: weather")
        await expect(log.locator(".call code")).to_have_text('{\n  "city": "Bern"\n}')
    assert sorted(body["model"] for _, body in models.asked) == ["one", "two"]
    headers, body = models.asked[0]
    assert headers["authorization"].startswith("Bearer cp_")
    assert "cookie" not in headers
    assert body["temperature"] == 0.2
    assert body["messages"][0] == {"role": "system", "content": "Be short."}
    assert body["messages"][1]["content"][0] == {"type": "text", "text": "What is here?"}
    assert body["messages"][1]["content"][1]["image_url"]["url"].startswith("data:image/png;base64,")
    token = headers["authorization"].removeprefix("Bearer ")
    kept = await page.evaluate(
        "JSON.stringify([{...localStorage}, {...sessionStorage}, document.documentElement.outerHTML])"
    )
    assert token not in kept, "the token is in a variable only"
    assert "What is here?" in kept

    await page.reload()
    await page.get_by_role("button", name="What is here?", exact=True).click()
    await expect(page.get_by_role("log", name="Conversation beside it")).to_contain_text("tool call: weather")
    other = await person.tab()
    await other.goto(f"{app[1]}/playground")
    await page.get_by_role("button", name="Sign out").click()
    await page.wait_for_url("**/login?why=out")
    await page.wait_for_function("localStorage.getItem('corral.playground') === null")
    await other.wait_for_url("**/login**")
    assert await other.evaluate("localStorage.getItem('corral.playground')") is None


async def test_errors_of_the_gateway_are_shown_as_they_are(person: Watched, app: tuple[PageApp, str]) -> None:
    page = await open_playground(person, app)
    await install(app, page, "three")
    await page.reload()

    async def refuse(route: Route) -> None:
        await route.fulfill(status=503, json={"error": {"message": "No replica is ready."}})

    await page.route("**/v1/chat/completions", refuse)
    await expect(page.get_by_label("Model", exact=True).first).not_to_have_value("")
    await page.get_by_label("Message").fill("Hello")
    await page.get_by_role("button", name="Send").click()
    await expect(page.get_by_role("log", name="Conversation", exact=True)).to_contain_text("No replica is ready.")


async def test_an_expired_token_is_renewed_once(person: Watched, app: tuple[PageApp, str]) -> None:
    page = await open_playground(person, app)
    await install(app, page, "four")
    await page.reload()
    tokens: list[str] = []

    async def expired_at_first(route: Route) -> None:
        tokens.append((await route.request.all_headers())["authorization"])
        if len(tokens) == 1:
            error = {"message": "expired", "code": "expired_playground_token"}
            await route.fulfill(status=401, json={"error": error})
        else:
            await Models({"content": "back"}).route(route)

    await page.route("**/v1/chat/completions", expired_at_first)
    await expect(page.get_by_label("Model", exact=True).first).not_to_have_value("")
    await page.get_by_label("Message").fill("Hello")
    await page.get_by_role("button", name="Send").click()
    await expect(page.get_by_role("log", name="Conversation", exact=True)).to_contain_text("back")
    assert len(tokens) == 2


async def test_two_texts_are_compared_and_documents_ranked(person: Watched, app: tuple[PageApp, str]) -> None:
    page = await open_playground(person, app, "/playground?tab=embeddings")
    key = await app[0].key()
    for name, more in (("vectors", {"embeddings": True}), ("judge", {"reranking": True})):
        made = {"definition": {"name": name, "backend": "mock", **more}}
        await page.request.post(f"{app[1]}/api/models", data=made, headers={"authorization": f"Bearer {key}"})
    await page.reload()

    async def embed(route: Route) -> None:
        await route.fulfill(json={"data": [{"index": 1, "embedding": [0, 2, 0]}, {"index": 0, "embedding": [0, 1, 0]}]})

    async def rank(route: Route) -> None:
        results = [{"index": 0, "relevance_score": 0.1}, {"index": 1, "relevance_score": 0.9}]
        await route.fulfill(json={"results": results})

    await page.route("**/v1/embeddings", embed)
    await page.route("**/v1/rerank", rank)
    await page.get_by_label("First text").fill("a horse")
    await page.get_by_label("Second text").fill("a pony")
    await page.get_by_role("button", name="Compare", exact=True).last.click()
    await expect(page.locator("#compare output")).to_contain_text(
        "1.000 cosine similarity of two vectors with 3 numbers"
    )
    await page.get_by_role("tab", name="Rerank").click()
    await expect(page).to_have_url(f"{app[1]}/playground?tab=rerank")
    await page.get_by_label("Question").fill("who barks?")
    await page.get_by_label("Documents, one per line").fill("a cat\na dog")
    await page.get_by_role("button", name="Rank", exact=True).click()
    await expect(page.locator("#rank output li").first).to_contain_text("a dog")


TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"properties": {"city": {}}}}}]


async def test_results_of_tools_are_typed_and_the_conversation_goes_on(
    person: Watched, app: tuple[PageApp, str]
) -> None:
    page = await open_playground(person, app)
    await install(app, page, "five")
    await page.goto(f"{app[1]}/playground?model=five")
    await expect(page.get_by_label("Model", exact=True).first).to_have_value("five")
    calling = Models(
        {"tool_calls": [{"index": 0, "id": "c1", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}]},
        {"tool_calls": [{"index": 1, "function": {"name": "weather", "arguments": "{}"}}]},
    )
    await page.route("**/v1/chat/completions", calling.route)
    await page.get_by_text("Parameters").click()
    tools = page.get_by_label("Tools, as JSON")
    for wrong, said in (
        ("[", "this is not JSON"),
        ("{}", "write a JSON list"),
        ('[{"type": "x"}]', '"type" must be "function"'),
        ('[{"type": "function", "function": {"name": "a b"}}]', '"name" must be'),
        ('[{"type": "function", "function": {"name": "a", "parameters": []}}]', "must be a JSON schema"),
        (json.dumps(TOOLS * 2), "two tools have this name"),
    ):
        await tools.fill(wrong)
        await expect(page.locator("#tools-told")).to_contain_text(said)
        await expect(tools).to_have_attribute("aria-invalid", "true")
    await tools.fill(json.dumps(TOOLS))
    await expect(page.locator("#tools-told")).to_have_text("1 tool: weather(city)")
    await page.get_by_label("Message").fill("Weather?")
    await page.get_by_label("Message").press("Enter")
    log = page.get_by_role("log", name="Conversation", exact=True)
    results = log.get_by_label("Result of weather")
    await expect(results).to_have_count(2)
    assert calling.asked[0][1]["tools"] == TOOLS
    await page.get_by_label("Message").focus()  # the receipt that arrives meanwhile takes nothing that was typed
    await results.first.fill("<b>sun</b>")
    await results.last.fill('{"wind": 3}')
    answering = Models({"content": "It is sunny."})
    await page.unroute("**/v1/chat/completions")
    await page.route("**/v1/chat/completions", answering.route)
    await log.get_by_role("button", name="Send the result and continue").click()
    await expect(log).to_contain_text("It is sunny.")
    await expect(log.locator(".result code").first).to_have_text("<b>sun</b>")
    await expect(log.locator("form.results")).to_have_count(0)
    question, calls, first, second = answering.asked[0][1]["messages"]
    assert question == {"role": "user", "content": "Weather?"}
    assert [call["id"] for call in calls["tool_calls"]] == ["c1", "call_1"]
    assert calls["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "Bern"}'}
    assert (first["role"], first["tool_call_id"], first["content"]) == ("tool", "c1", "<b>sun</b>")
    assert (second["tool_call_id"], second["content"]) == ("call_1", '{"wind": 3}')

    # Kept with the conversation; a call that nobody answered can still be answered after a reload.
    await page.unroute("**/v1/chat/completions")
    await page.route("**/v1/chat/completions", calling.route)
    await page.get_by_label("Message").fill("And tomorrow?")
    await page.get_by_label("Message").press("Enter")
    await expect(results).to_have_count(2)
    await expect(page.locator("#kept")).to_contain_text("Weather?")
    await page.reload()
    await page.get_by_role("button", name="Weather?", exact=True).click()
    await expect(results).to_have_count(2)
    await expect(log.locator(".result code")).to_have_count(2)
