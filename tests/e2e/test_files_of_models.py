"""The files of a model on a real fleet: staged to two workers before a load, listed, and freed when not needed."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.async_api import expect

from tests.support.chromium import chromium, new_person, sign_in
from tests.support.fleet import Fleet
from tests.support.waiting import wait_for

WEIGHTS = b"GGUF" + os.urandom(3_000_000)


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    models = tmp_path / "data" / "controller" / "models"
    models.mkdir(parents=True)
    (models / "ours.gguf").write_bytes(WEIGHTS)
    fleet = Fleet(tmp_path, "--no-worker")
    try:
        fleet.start()
        fleet.join("attic", token=fleet.token("--pre-approved"))
        fleet.join("barn", token=fleet.token("--pre-approved"))
        for name in ("attic", "barn"):
            fleet.wait_status(name, "healthy")
        definition = tmp_path / "own.yaml"
        definition.write_text("name: own\nbackend: mock\nparameters: {model: ours.gguf}\n")
        assert fleet.cli("models", "install", "--file", str(definition), "--no-fetch").returncode == 0
        yield fleet
    finally:
        fleet.close()


def states(fleet: Fleet) -> dict[str, str]:
    listed = fleet.cli("models", "files", "own", "--json")
    assert listed.returncode == 0, listed.stderr
    return {node["node_name"]: node["state"] for node in json.loads(listed.stdout)["nodes"]}


def disk_bytes(folder: Path) -> int:
    """Each inode once, however many names it has."""
    found = {
        (path.stat().st_dev, path.stat().st_ino): path.stat().st_size for path in folder.rglob("*") if path.is_file()
    }
    return sum(found.values())


def test_files_are_staged_listed_and_freed(fleet: Fleet) -> None:
    assert states(fleet) == {"attic": "unknown", "barn": "unknown"}
    one = fleet.cli("models", "stage", "own", "--node", "attic")
    assert one.returncode == 0, one.stderr
    assert one.stdout.splitlines()[-1] == "own: staged to attic: 2.9 MiB from controller"
    assert states(fleet) == {"attic": "whole", "barn": "none"}
    every = fleet.cli("models", "stage", "own")
    assert every.returncode == 0, every.stderr
    shown = fleet.cli("models", "files", "own")
    assert "ours.gguf" in shown.stdout
    assert shown.stdout.count("whole") == 2
    for name in ("attic", "barn"):
        (staged,) = (fleet.root / f"worker-{name}" / "models" / "own").rglob("ours.gguf")
        assert staged.read_bytes() == WEIGHTS
    kinds = [(each["kind"], each["outcome"]) for each in json.loads(fleet.cli("ops", "list", "--all", "--json").stdout)]
    assert sorted(kinds) == [("fetch", "completed"), ("stage", "completed"), ("stage", "completed")]

    nothing = fleet.cli("models", "gc", "--dry-run")
    assert (nothing.returncode, nothing.stdout) == (0, "Nothing to remove.\n")
    assert fleet.cli("models", "delete", "own", "--yes").returncode == 0
    for name in ("attic", "barn"):  # what was used within the last half minute stays
        for record in (fleet.root / f"worker-{name}" / "models" / ".blobs" / "sets").glob("*.json"):
            os.utime(record, (1.0, 1.0))
    dry = json.loads(fleet.cli("models", "gc", "--dry-run", "--json").stdout)
    assert {place["node_name"] for place in dry["places"]} == {"controller", "attic", "barn"}
    freed = fleet.cli("models", "gc")  # workers may have learnt of the deletion before
    assert freed.returncode == 0, freed.stderr

    def is_free() -> bool:
        return all(disk_bytes(fleet.root / f"worker-{name}" / "models") < 1000 for name in ("attic", "barn"))

    wait_for(is_free, "the disk of both workers")
    assert disk_bytes(fleet.root / "data" / "controller" / "blobs" / "sha256") == 0

    unknown = fleet.refused("models", "stage", "nothing")
    assert "there is no model 'nothing'" in unknown
    assert "there is no node" in fleet.refused("models", "stage", "own", "--node", "cellar")


@pytest.mark.browser
async def test_the_page_shows_where_the_files_are_and_brings_them(fleet: Fleet) -> None:
    staged = await asyncio.to_thread(fleet.cli, "models", "stage", "own", "--node", "attic")
    assert staged.returncode == 0, staged.stderr
    async with chromium() as browser, new_person(browser) as person:
        page = await person.tab()
        await sign_in(page, fleet.url, fleet.key)
        await page.get_by_role("link", name="Models").click()
        await page.get_by_role("button", name="Actions for own").click()
        await page.locator("#menu").get_by_role("button", name="Files").click()
        dialog = page.get_by_role("dialog", name="Where the files of own are")
        nodes = dialog.get_by_role("list", name="Nodes").get_by_role("listitem")
        await expect(nodes).to_have_count(2)
        await expect(nodes.nth(0)).to_contain_text("barn")
        await expect(nodes.nth(0).locator(".pill")).to_have_text("none")
        await expect(nodes.nth(1).locator(".pill")).to_have_text("complete")
        await expect(dialog.get_by_role("row", name="ours.gguf")).to_contain_text("yes")
        await expect(dialog.get_by_text("1 of 2 have everything")).to_be_visible()
        await dialog.get_by_role("button", name="Bring the files to every node").click()
        await expect(dialog.get_by_text("2 of 2 have everything")).to_be_visible()
        await page.keyboard.press("Escape")
        await expect(dialog).to_be_hidden()
        await person.assert_clean()
