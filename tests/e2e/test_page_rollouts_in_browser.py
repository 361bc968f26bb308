"""Trials of new revisions on the page of operations: what is shown of them, and the buttons that steer them."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Locator, Page, expect

from tests.support.chromium import Watched, new_person, open_signed_in
from tests.support.page import PageApp, open_model_page, served
from tests.support.processes import free_port
from tests.support.replica_fleet import ReplicaFleet, ReplicaWorker
from tests.support.trials import MODEL, Trial

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="module")]


@dataclass
class Corral:
    page: PageApp
    fleet: ReplicaFleet
    url: str
    barn: ReplicaWorker
    trial: Trial


@pytest_asyncio.fixture(loop_scope="module")
async def corral(tmp_path: Path) -> AsyncIterator[Corral]:
    """A model whose new revision soaks, with requests of both."""
    async with open_model_page(tmp_path) as (page, fleet), served(page, free_port()) as url:
        barn = await fleet.worker("barn", has="llama-cpp")
        trial = Trial(fleet)
        await trial.serve()
        await trial.answer(barn, trial.old, 40)
        await trial.begin()
        await trial.answer(barn, trial.new, 40)
        yield Corral(page, fleet, url, barn, trial)


@pytest_asyncio.fixture(loop_scope="module")
async def person(browser: Browser) -> AsyncIterator[Watched]:
    async with new_person(browser) as person:
        yield person
        await person.assert_clean()


async def shown(person: Watched, corral: Corral, role: str = "admin") -> tuple[Page, Locator]:
    page = await open_signed_in(person, corral.url, "/fleet/operations", await corral.page.key(role))
    return page, page.locator(f'article[data-key="{corral.trial.operation}"]')


async def press(page: Page, one: Locator, verb: str) -> None:
    await one.get_by_role("button", name=re.compile(verb)).click()
    ask = page.get_by_role("dialog", name=re.compile(f"{verb} new revision of {MODEL}"))
    await ask.get_by_role("button", name=verb).click()


async def test_a_trial_is_paused_resumed_and_aborted(person: Watched, corral: Corral) -> None:
    page, one = await shown(person, corral)
    await expect(one).to_contain_text("5 % of the requests")
    await expect(one).to_contain_text("40 requests of the new revision, 40 of the old one")
    await expect(one).to_contain_text("within the limit: time to first token of m")
    await expect(one).to_contain_text("Plan: a replica of the new revision starts beside the old one on barn")
    await press(page, one, "Pause")
    await expect(one.locator(".rollout-head .pill")).to_have_text("paused")
    await expect(one.get_by_role("button", name="Pause")).to_have_count(0)
    await press(page, one, "Resume")
    await expect(one.locator(".rollout-head .pill")).to_have_text("soaking")
    await press(page, one, "Abort")
    await expect(one.locator(".rollout-head .pill")).to_have_text("reverted")
    await expect(one).to_contain_text("reverted: aborted by admin key")
    await expect(one.get_by_role("button")).to_have_count(0)
    await corral.trial.until_revisions(corral.trial.old)


async def test_a_trial_is_promoted(person: Watched, corral: Corral) -> None:
    page, one = await shown(person, corral)
    await press(page, one, "Promote")
    await expect(one.locator(".rollout-head .pill")).to_have_text("done")
    await expect(one).to_contain_text("promoted by admin key")
    await corral.trial.until_revisions(corral.trial.new)


async def test_a_viewer_sees_the_figures_and_no_buttons(person: Watched, corral: Corral) -> None:
    _, one = await shown(person, corral, "viewer")
    await expect(one).to_contain_text("within the limit: time to first token of m")
    await expect(one.get_by_role("button")).to_have_count(0)
