"""What gateways are told: nothing about nodes nobody let in, and no token that opens more than one door."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

from corral.controller.gateways.view import FleetViews
from tests.support.manual_clock import ManualClock
from tests.support.registry import Registry, open_registry
from tests.support.sqlite import sqlite_url


def views_of(registry: Registry) -> FleetViews:
    return FleetViews(registry.store, registry.issuer, registry.ingress_tokens, registry.clock)


def claims(token: str) -> dict[str, Any]:
    return dict(json.loads(base64.urlsafe_b64decode(token.partition(".")[0] + "==")))


async def test_each_node_is_shown_a_token_that_opens_it_alone(tmp_path: Path) -> None:
    """A node sees the token of every request it is sent. One with the audience `*` would let it use all the others."""
    async with open_registry(sqlite_url(tmp_path)) as registry:
        for name in ("barn", "byre"):
            await registry.join(name, pre_approved=True)
        view = await views_of(registry).build()
        assert [claims(node.ingress_token)["aud"] for node in view.nodes] == [node.id for node in view.nodes]
        assert {tuple(claims(node.ingress_token)["scope"]) for node in view.nodes} == {("replicas",)}
        assert "*" not in str([claims(node.ingress_token) for node in view.nodes])


async def test_a_node_nobody_let_in_is_not_in_the_view(tmp_path: Path) -> None:
    async with open_registry(sqlite_url(tmp_path)) as registry:
        await registry.join("stranger")
        await registry.join("friend", pre_approved=True)
        assert [node.name for node in (await views_of(registry).build()).nodes] == ["friend"]


async def test_tokens_are_signed_once_a_quarter_of_an_hour_and_never_run_out(tmp_path: Path) -> None:
    clock = ManualClock()
    async with open_registry(sqlite_url(tmp_path), clock=clock) as registry:
        await registry.join("barn", pre_approved=True)
        views = views_of(registry)
        first, tag = (await views.build()).nodes[0].ingress_token, await views.tag()
        assert (await views.build()).nodes[0].ingress_token == first
        clock.advance(900)
        assert await views.tag() != tag, "gateways come for the new one"
        second = (await views.build()).nodes[0].ingress_token
        assert claims(second)["exp"] - claims(first)["exp"] == 900
