"""Which pages the navigation shows to whom, and where a sign-in may lead."""

from __future__ import annotations

import pytest

from corral.controller.access.principal import Role
from corral.controller.web.navigation import is_place, places_for
from tests.unit.web.browsing import Browser


@pytest.mark.parametrize("role", [Role.ADMIN, Role.VIEWER])
async def test_every_entry_of_the_navigation_leads_to_a_page(browser: Browser, role: Role) -> None:
    await browser.signed_in(role.value)
    for place in places_for(role):
        text = (await browser.get(place.path)).text
        assert f'href="{place.path}" aria-current="page"' in text, place


@pytest.mark.parametrize(
    ("wanted", "allowed"),
    [
        ("/", True),
        ("/nodes", True),
        ("/nodes/barn", True),
        ("/models/org/m%20x", True),
        ("/fleet/requests?model=m&failed=true", True),
        ("", False),
        ("//evil.example", False),
        ("/nodes//../..", True),  # ours, and a page that is not found
        ("https://evil.example", False),
        ("/\\evil", False),
        ("/nodes/\\evil", False),
        ("/nodes/a\r\nX: y", False),
        ("/nodes/ä", False),
        ("/api/me", False),
    ],
)
def test_a_sign_in_leads_to_our_pages_only(wanted: str, allowed: bool) -> None:
    assert is_place(wanted) is allowed


async def test_an_address_with_a_query_is_kept_over_the_sign_in(browser: Browser) -> None:
    answer = await browser.get("/fleet/requests?model=a%2Fb&failed=true")
    assert answer.headers["location"] == "/login?next=/fleet/requests%3Fmodel%3Da%252Fb%26failed%3Dtrue"
    away = await browser.get("/fleet/requests?model=m", Sec_Fetch_Site="cross-site")
    assert away.headers["refresh"] == "0; url=/fleet/requests?model=m&again"


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        ("/nodes/%00", 400, "text must not contain NUL characters."),
        ("/nodes/" + "x" * 3000, 400, "A name or a filter in the address cannot be read."),
        ("/nodes/nosuch", 404, "nosuch"),
    ],
)
async def test_an_address_that_cannot_be_read_is_the_callers_error(
    browser: Browser, path: str, status: int, words: str
) -> None:
    await browser.signed_in("viewer")
    answer = await browser.get(path)
    assert (answer.status_code, words in answer.text, "x" * 100 in answer.text) == (status, True, False)


@pytest.mark.parametrize("name", ["models", "requests", "operations", "logs", "keys", "settings"])
async def test_an_address_typed_by_hand_leads_a_browser_to_the_page(browser: Browser, name: str) -> None:
    page = await browser.get(f"/{name}?find=x", Accept="text/html,application/xhtml+xml,*/*;q=0.8")
    assert (page.status_code, page.headers["location"]) == (303, f"/fleet/{name}?find=x")
    program = await browser.get(f"/{name}", Accept="application/json")
    assert program.status_code == 404
    assert program.json()["error"]["message"] == f"there is no /{name} here; /docs lists what there is"
