"""Keys, settings, requests and the catalogue on the page: what each shows, to whom, and that no secret is among it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from corral.contract.admin import CreateKey, KeyView
from corral.contract.receipts import Receipt, Receipts
from corral.contract.view import KeyLimits
from corral.controller.gateways.receipts import ReceiptService
from corral.controller.settings import ControllerSettings
from corral.controller.web.catalogue_page import catalogue_lines
from corral.controller.web.keys import key_lines
from corral.controller.web.list_filter import ListFilter
from corral.controller.web.requests import RequestFilter, in_flight_rows, span
from corral.controller.web.settings import EffectiveSettings
from corral.kit.clock import SystemClock
from corral.kit.settings import describe, origins_of, read_settings, shown
from corral.store.tables.receipts import KeyUsage
from tests.support.manual_clock import ManualClock
from tests.support.page import PageApp, made_node
from tests.unit.web.browsing import Browser

NOW = datetime(2026, 1, 31, 12, tzinfo=UTC)


def key(name: str, **more: object) -> KeyView:
    known: dict[str, object] = {
        "id": f"id-{name}",
        "role": "inference",
        "state": "active",
        "created_at": "2026-01-01T00:00:00Z",
    }
    known |= {"models": None, "limits": None, "expires_at": "", "last_used_at": ""}
    return KeyView(name=name, **(known | more))  # type: ignore[arg-type]


def test_a_key_in_one_line() -> None:
    limits = KeyLimits(requests_per_min=60, concurrent=2)
    soon = (NOW + timedelta(hours=5)).isoformat()
    ended, full = key_lines(
        [key("old", state="revoked"), key("app", models=("a", "b"), limits=limits, expires_at=soon)],
        {"id-app": KeyUsage(1200, 3, 50, 7000)},
        "id-app",
        NOW,
    )[::-1]
    assert (full.name, full.models, full.named, full.limits) == ("app", "", ("a", "b"), "60 requests/min, 2 at once")
    assert (full.expires, full.used, full.own) == ("in 5 h", "never", True)
    assert (full.requests, full.failed, full.tokens) == ("1,200", "3 failed", "50 → 7,000")
    assert (ended.state, ended.requests, ended.limits, ended.models) == ("revoked", "", "none", "every model")


@pytest.mark.parametrize("role", ["viewer", "inference"])
@pytest.mark.parametrize("path", ["/fleet/keys", "/fleet/settings"])
async def test_keys_and_settings_are_for_administrators(browser: Browser, role: str, path: str) -> None:
    await browser.signed_in(role)
    answer = await browser.get(path)
    assert (answer.status_code, answer.headers["location"]) == (303, "/" if role == "viewer" else "/playground")
    assert (await browser.get("/page/keys")).status_code == 403


@pytest.mark.parametrize("role", ["inference"])
@pytest.mark.parametrize("path", ["/fleet/logs?name=x", "/fleet/requests/r-1?at=2026-01-31T12:00:00Z",
                                  "/fleet/backends/catalogue"])  # fmt: skip
async def test_pages_of_the_fleet_are_not_for_those_who_only_use_models(browser: Browser, role: str, path: str) -> None:
    await browser.signed_in(role)
    assert (await browser.get(path)).headers["location"] == "/playground"


async def test_no_key_is_on_the_page_of_keys(browser: Browser, page: PageApp) -> None:
    secret = (await page.access.create(CreateKey(name="<b>app</b>", role="inference"))).secret
    await browser.signed_in()
    for path in ("/fleet/keys", "/page/keys"):
        text = (await browser.get(path)).text
        assert "&lt;b&gt;app&lt;/b&gt;" in text
        assert secret not in text
        assert "secret_hash" not in text
        assert "ck_" not in text


def test_settings_say_where_they_come_from(tmp_path: Path) -> None:
    file = tmp_path / "corral.toml"
    file.write_text('stale_after = "90s"\n')
    given = read_settings(
        ControllerSettings, flags={"lease_ttl_s": "7s"}, env={"CORRAL_HEALTH_INTERVAL": "3s"}, file=file
    )
    origins = origins_of(given)
    assert dict(origins) == {
        "lease_ttl_s": "--lease-ttl",
        "health_interval_s": "CORRAL_HEALTH_INTERVAL",
        "stale_after_s": f"{file}: stale_after",
    }
    groups = EffectiveSettings(describe(ControllerSettings), shown(given), origins).groups()
    assert [group.title for group in groups] == ["Given at this start", "Defaults"]
    assert {line.name for line in groups[0].lines} == {"--lease-ttl", "--health-interval", "--stale-after"}
    assert given == read_settings(
        ControllerSettings, flags={"lease_ttl_s": "7s", "health_interval_s": "3s", "stale_after_s": "90s"}, env={}
    ), "where a value comes from is no part of it"


def test_no_secret_setting_is_shown() -> None:
    secrets = [doc for doc in describe(ControllerSettings) if doc.secret]
    assert secrets, "else this test shows nothing"
    given = read_settings(
        ControllerSettings,
        flags={doc.name: "hunter2-hunter2" for doc in secrets if "token" in doc.name or "key" in doc.name}
        | {"store": "postgresql://corral:hunter2-hunter2@db/corral"},
        env={},
    )
    settings = EffectiveSettings(describe(ControllerSettings), shown(given), origins_of(given))
    lines = [line for group in settings.groups() for line in group.lines]
    assert "hunter2" not in repr(lines)
    assert {line.value for line in lines if line.name in {doc.flag for doc in secrets}} <= {"set", "not set"}
    assert "set" in {line.value for line in lines}


async def test_the_page_of_settings_is_searched(browser: Browser) -> None:
    await browser.signed_in()
    text = (await browser.get("/fleet/settings?find=health+interval")).text
    assert '<code title="CORRAL_HEALTH_INTERVAL">--health-interval</code>' in text
    assert "--lease-ttl" not in text
    assert "No setting matches" in (await browser.get("/fleet/settings?find=zzzz")).text


async def test_requests_are_filtered_by_the_address_and_shown_whole(
    browser: Browser, page: PageApp, door_clock: ManualClock
) -> None:
    service = ReceiptService(page.store, SystemClock())
    now = door_clock.now().timestamp()
    made = [
        Receipt(id="new", at=now - 60, key_id="k", model="m", path="/v1/chat/completions", status=200, node_id="n",
                first_byte_ms=100, total_ms=83_000, completion_tokens=830, streamed=True),
        Receipt(id="old", at=now - 7200, key_id="k", model="m", path="/v1/embeddings", status=503),
        Receipt(id="other", at=now - 60, key_id="z", model="<i>x</i>", path="/v1/embeddings", status=200),
    ]  # fmt: skip
    await service.take(Receipts(receipts=tuple(made)))
    await browser.signed_in()
    for query, expected in (
        ("", {"new", "old", "other"}),
        ("?key=k", {"new", "old"}),
        ("?key=k&since=1h", {"new"}),
        ("?node=n", {"new"}),
        ("?failed=true", {"old"}),
        ("?since=nonsense", {"new", "old", "other"}),
        ("?model=nobody", set()),
    ):
        for path in ("/fleet/requests", "/page/requests"):
            text = (await browser.get(path + query)).text
            assert {each for each in ("new", "old", "other") if f"/fleet/requests/{each}?at=" in text} == expected, (
                query
            )
    text = (await browser.get("/fleet/requests")).text
    link = text.partition('href="/fleet/requests/new?at=')[2].partition('"')[0]
    whole = (await browser.get(f"/fleet/requests/new?at={link}")).text
    for words in ("/v1/chat/completions", "1 min 23 s", "<dt>Tokens per second</dt><dd>10.0</dd>", "whole, streamed"):
        assert words in whole
    assert "<i>x</i>" not in text
    for bad in (
        "/fleet/requests/new",
        "/fleet/requests/new?at=nonsense",
        "/fleet/requests/none?at=2026-01-01T00:00:00Z",
    ):
        assert (await browser.get(bad)).status_code == 404


@pytest.mark.parametrize(
    ("ms", "words"),
    [(0, ""), (0.4, ""), (12, "12 ms"), (999, "999 ms"), (1500, "1.50 s"), (42_000, "42.0 s"), (83_000, "1 min 23 s")],
)
def test_spans_of_time_as_people_say_them(ms: float, words: str) -> None:
    assert span(ms) == words


def test_requests_that_replicas_serve_now() -> None:
    row = {"model_name": "m", "node_name": "barn", "node_id": "n-1", "in_flight": 2}
    rows = [row, row | {"in_flight": 1}, row | {"node_name": "byre", "in_flight": 0}, row | {"model_name": "x"}]
    counts = [(each.model, each.node, each.count) for each in in_flight_rows(rows, RequestFilter())]
    assert counts == [("m", "barn", 3), ("x", "barn", 2)]
    assert [each.model for each in in_flight_rows(rows, RequestFilter(model="x"))] == ["x"]
    assert not in_flight_rows(rows, RequestFilter(node="byre"))


def test_the_catalogue_says_where_each_backend_fits() -> None:
    entries = [
        {"name": "cuda", "description": "For\nNVIDIA.", "gallery": {"name": "corral"}, "tags": ["gpu"]},
        {"name": "cpu", "alias": "engine", "gallery": {"name": "corral"}},
        {"name": "cpu", "alias": "second gallery", "gallery": {"name": "other"}},
    ]
    fits = {"cpu": ["d", "a", "c", "b"]}
    lines = catalogue_lines(entries, fits, {"cpu": 2}, ListFilter())
    assert [(line.name, line.fits_on, line.fits_more, line.installed) for line in lines] == [
        ("cpu", ("a", "b", "c"), 1, "2 nodes"),
        ("cuda", (), 0, ""),
    ]
    assert (lines[0].alias, lines[1].about) == ("engine", "For NVIDIA.")
    assert [line.name for line in catalogue_lines(entries, fits, {}, ListFilter(find="GPU"))] == ["cuda"]
    assert [line.name for line in catalogue_lines(entries, fits, {}, ListFilter(only="fits"))] == ["cpu"]


async def test_the_logs_of_a_worker_are_a_source_without_a_name(browser: Browser, page: PageApp) -> None:
    await page.put(made_node("barn"))
    await browser.signed_in()
    text = (await browser.get("/fleet/logs?node=barn&worker=true")).text
    assert 'data-node="barn" data-name=""' in text
    assert 'aria-label="Lines of the worker of barn"' in text
    assert "/fleet/logs?node=barn&amp;worker=true" in (await browser.get("/fleet/logs?node=barn")).text
    assert "/fleet/logs?node=barn&amp;worker=true" in (await browser.get("/nodes/barn")).text
    assert "Choose the node" in (await browser.get("/fleet/logs?worker=true")).text


async def test_requests_under_way_are_rows_and_everybody_sees_what_is_theirs(browser: Browser, page: PageApp) -> None:
    mine, other = await page.key("inference"), "key-of-others"
    own_id = (await page.access.by_key(mine)).key_id
    made = {"at": 1.0, "model": "tiny", "path": "/v1/chat/completions"}
    report = {
        "gateway": "g1",
        "requests": [
            {**made, "id": "u1", "key_id": own_id, "node_id": "n-1", "tokens": 12},
            {**made, "id": "u2", "key_id": other, "model": "<i>x</i>"},
        ],
        "total": 5,
    }
    gateway = {"Authorization": f"Bearer {await page.key('gateway')}"}

    async def reported(path: str) -> str:
        assert (await browser.client.post("/internal/running", json=report, headers=gateway)).status_code == 202
        return (await browser.get(path)).text

    await browser.sign_in(mine)
    text = await reported("/usage")
    assert "~12 tokens" in text
    assert "&lt;i&gt;" not in text
    browser.client.cookies.clear()
    await browser.signed_in("viewer")
    for path in ("/fleet/requests", "/page/requests"):
        text = await reported(path)
        assert "the oldest 2 of 5" in text
        assert 'data-key="running u1"' in text
        assert "answering" in text
        assert "<i>x</i>" not in text
    assert "running u2" not in await reported("/fleet/requests?model=tiny")


async def test_models_of_a_key_are_links(browser: Browser, page: PageApp) -> None:
    await page.key("inference", models=("org/a", "b", "c", "d", "e", "f"))
    await browser.signed_in()
    text = (await browser.get("/fleet/keys")).text
    assert '<a href="/models/org/a">org/a</a>, ' in text
    assert " more</td>" in text
