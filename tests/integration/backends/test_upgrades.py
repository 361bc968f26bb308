"""What is newer than what is installed: found in time, on demand and after changes, by one controller for all."""

from __future__ import annotations

from typing import Any

from corral.contract.messages.backends import NodeDrift, UpgradeInfo
from corral.controller.backends.plan import NoBuild
from corral.kit.errors import Unavailable
from tests.support.backend_fleet import Fleet, quick
from tests.support.waiting import until

NEWER = UpgradeInfo("vllm", "1.0", "2.0", "sha256:cpu-vllm-1", "sha256:2")


async def found(fleet: Fleet) -> list[str]:
    return sorted((await fleet.first.backends.upgrades.read()).upgrades)


async def until_found(fleet: Fleet, *names: str) -> None:
    async def told() -> bool:
        return await found(fleet) == list(names)

    await until(told)


async def test_after_each_change_of_an_inventory(fleet: Fleet) -> None:
    barn = await fleet.corral("barn")
    await until_found(fleet)
    fleet.catalogue.newer = {"vllm": NEWER}
    barn.put("vllm", digest="sha256:cpu-vllm-1")
    await barn.beat()
    await until_found(fleet, "vllm")
    fleet.catalogue.newer = {}
    barn.put("vllm", digest="sha256:2")
    await barn.beat()
    await until_found(fleet)


async def test_on_demand_galleries_are_read_anew(fleet: Fleet) -> None:
    await fleet.corral("barn")
    before = fleet.catalogue.refreshed
    fleet.catalogue.newer = {"vllm": NEWER}
    await fleet.first.backends.upgrades.request_check()
    await until_found(fleet, "vllm")
    # The check of the start may have been under way, and have found it first.
    await until(lambda: fleet.catalogue.refreshed > before)


async def test_every_controller_tells_what_one_found(fleet: Fleet) -> None:
    second = await fleet.controller("c2")
    fleet.catalogue.newer = {"vllm": NEWER}
    await second.backends.upgrades.request_check()
    await until_found(fleet, "vllm")
    checked = await second.backends.upgrades.read()
    assert checked.upgrades["vllm"] == NEWER
    assert checked.checked_at.endswith("Z")


async def test_a_gallery_that_is_away_leaves_what_was_found_before(fleet: Fleet, monkeypatch: Any) -> None:
    fleet.catalogue.newer = {"vllm": NEWER}
    await fleet.first.backends.upgrades.request_check()
    await until_found(fleet, "vllm")
    asked: list[object] = []

    async def away(inventories: Any) -> dict[str, UpgradeInfo]:
        asked.append(inventories)
        raise Unavailable("nobody answers")

    monkeypatch.setattr(fleet.catalogue, "upgrades", away)
    await fleet.first.backends.upgrades.request_check()
    await until(lambda: len(asked) > 0)
    assert await found(fleet) == ["vllm"]


async def test_with_a_fresh_gallery_builds_that_were_missing_are_looked_for_again(fleet: Fleet) -> None:
    build = fleet.catalogue.builds["vllm"]["*"]
    fleet.catalogue.builds["vllm"]["*"] = NoBuild("no linux/amd64 build")
    barn = await fleet.corral("barn")
    operation = await fleet.install()
    view = await fleet.until(operation, "done")
    assert view.nodes[0].status == "skipped"
    fleet.catalogue.builds["vllm"]["*"] = build
    await fleet.first.backends.upgrades.request_check()
    await until(lambda: "vllm" in barn.installed)


async def test_auto_upgrade_asks_for_what_was_found(fleet: Fleet) -> None:
    barn = await fleet.corral("barn")
    await fleet.until(await fleet.install(), "done")
    await fleet.first.kill()
    fleet.catalogue.publish("vllm", "sha256:2")
    fleet.catalogue.newer = {"vllm": NEWER}
    automatic = await fleet.controller("c2", settings=quick(auto_upgrade=True))
    await automatic.backends.upgrades.request_check()
    await until(lambda: barn.installed["vllm"]["digest"] == "sha256:2")
    views = await automatic.backends.operations.list_views(everything=True)
    assert [(view.kind, view.created_by) for view in views] == [("upgrade", ""), ("install", "")]


async def test_auto_upgrade_leaves_a_node_alone_that_reports_no_digest(fleet: Fleet) -> None:
    """It is listed after every check, and was upgraded after every check."""
    barn = await fleet.corral("barn")
    await fleet.until(await fleet.install(), "done")
    await fleet.first.kill()
    drift = NodeDrift(barn.node_id, "barn", "1.0")
    silent = UpgradeInfo("vllm", "1.0", "1.0", "sha256:cpu-vllm-1", node_drift=(drift,))
    fleet.catalogue.newer = {"vllm": silent}
    automatic = await fleet.controller("c2", settings=quick(auto_upgrade=True))
    assert await automatic.backends.upgrades.check() == {"vllm": silent}
    views = await automatic.backends.operations.list_views(everything=True)
    assert [view.kind for view in views] == ["install"]


async def test_a_check_is_not_repeated_before_its_time(fleet: Fleet) -> None:
    """Also by a controller that takes over: when the last one was is on file."""
    await until_found_once(fleet)
    await fleet.first.kill()
    before = (await fleet.first.backends.upgrades.read(), fleet.catalogue.refreshed)
    second = await fleet.controller("c2")

    async def took_over() -> bool:
        await second.backends.upgrades.run_once()
        return second.leadership.epoch("upgrades") > 0

    await until(took_over)
    await second.backends.upgrades.run_once()
    assert (await second.backends.upgrades.read(), fleet.catalogue.refreshed) == before


async def until_found_once(fleet: Fleet) -> None:
    async def checked() -> bool:
        return bool((await fleet.first.backends.upgrades.read()).checked_at)

    await until(checked)


async def test_nothing_is_upgraded_by_itself(fleet: Fleet) -> None:
    barn = await fleet.corral("barn")
    await fleet.until(await fleet.install(), "done")
    fleet.catalogue.publish("vllm", "sha256:2")
    fleet.catalogue.newer = {"vllm": NEWER}
    await fleet.first.backends.upgrades.request_check()
    await until_found(fleet, "vllm")
    await fleet.quiet()
    assert barn.installed["vllm"]["digest"] == "sha256:cpu-vllm-1"
    assert barn.orders("upgrade") == []
