"""Knocking at the door with nothing, too much, or somebody else's name."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from corral.bus.auth import node_user_key
from corral.bus.jwt import decode_claims
from corral.contract.hardware import Device
from corral.contract.messages.nodes import IngressOffer
from corral.controller.registry.admission import AdmissionRules
from corral.kit.errors import Conflict, Gone, Invalid, NoCapacity, Unauthenticated
from corral.store import Store
from corral.store.tables import bus_credentials, nodes
from corral.store.tables.nodes import Node
from tests.support.postgres import Postgres, postgres
from tests.support.registry import Registry, open_registry
from tests.support.sqlite import sqlite_url

__all__ = ["postgres"]


async def stored(registry: Registry, node_id: str) -> Node:
    async with registry.store.read() as tx:
        return await nodes.get(tx, node_id)


async def revoked_keys(registry: Registry) -> set[str]:
    async with registry.store.read() as tx:
        return {row.user_key for row in await bus_credentials.list_revoked(tx)}


def bus_user(jwt: str) -> str:
    return str(decode_claims(jwt)["sub"])


async def test_whoever_shows_nothing_of_ours_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite has one writer, and a row looked at in a writing transaction is locked: neither is a stranger's."""
    async with open_registry(sqlite_url(tmp_path)) as registry:
        await registry.join("barn")
        spent = await registry.token()
        await registry.register("byre", spent)

        def no_write(_: Store) -> Any:
            raise AssertionError("a writing transaction for a stranger")

        monkeypatch.setattr(Store, "write", no_write)
        for token, name in (
            ("cj_guess", "new"),
            ("cj_guess", "barn"),
            ("", "barn"),
            (spent, "third"),
            ("cn_x", "barn"),
        ):
            with pytest.raises(Unauthenticated):
                await registry.register(name, token, enrolment="guess")


async def test_the_token_is_looked_at_before_anything_else_is_said(tmp_path: Path) -> None:
    async with open_registry(sqlite_url(tmp_path)) as registry:
        with pytest.raises(Unauthenticated):
            await registry.register("", "cj_guess", node_type="toaster", enrolment="guess")


async def test_one_token_cannot_fill_the_database(tmp_path: Path) -> None:
    rules = AdmissionRules(auto_approve=False, shared_token="", most_pending=3)
    async with open_registry(sqlite_url(tmp_path), rules=rules) as registry:
        token = await registry.token(uses=None)
        for number in range(3):
            await registry.register(f"n{number}", token)
        with pytest.raises(NoCapacity, match="wait for approval"):
            await registry.register("n3", token)
        assert (await registry.register("n0", token)).status == "pending", "who waits already may ask again"
        assert (await registry.join("friend", pre_approved=True)).status == "healthy"
        await registry.admin.approve("n1")
        assert (await registry.register("n3", token)).status == "pending"


@pytest.mark.parametrize(
    ("offer", "sentence"),
    [
        ({"labels": {f"k{number}": "v" for number in range(200)}}, "200 labels are too many"),
        ({"name": "red\x9b31m"}, "control characters"),
        ({"name": "evil\u202egnp"}, "control characters"),
        ({"name": "--all-pending"}, "hyphen"),
        ({"available_disk": -1}, "sizes"),
        ({"protocol": -1}, "small numbers"),
        ({"ingress": None, "address": "a:1", "http_address": "127.0.0.1:4222/varz?x="}, "http_address"),
        ({"ingress": None, "address": "user@host:1"}, "address"),
        ({"ingress": IngressOffer(port=1, advertise="host/path")}, "ingress.advertise"),
        ({"ingress": IngressOffer(port=1, advertise="user:pass@host")}, "ingress.advertise"),
        ({"ingress": IngressOffer(port=1, advertise="host\r\nX-Evil: 1")}, "ingress.advertise"),
    ],
)
async def test_what_a_node_says_cannot_reach_further_than_it_should(
    tmp_path: Path, offer: dict[str, Any], sentence: str
) -> None:
    async with open_registry(sqlite_url(tmp_path)) as registry:
        with pytest.raises(Invalid, match=sentence):
            await registry.register(**({"name": "barn", "token": await registry.token()} | offer))


async def test_odd_names_of_devices_are_tamed_not_refused(tmp_path: Path) -> None:
    async with open_registry(sqlite_url(tmp_path)) as registry:
        devices = tuple(Device(vendor="nvidia", name="GPU\x00\x1b[31m™") for _ in range(1000))
        told = await registry.join("barn", devices=devices, version="1\n2", capability="c" * 5000)
        node = await stored(registry, told.id)
        assert len(node.devices) == 128
        assert node.devices[0].name == "GPU??[31m™"
        assert (node.version, node.capability) == ("1?2", "c" * 128)


async def test_an_advertised_port_alone_is_taken_at_the_address_we_saw(tmp_path: Path) -> None:
    async with open_registry(sqlite_url(tmp_path)) as registry:
        told = await registry.join("barn", ingress=IngressOffer(port=1, advertise=":7"), seen_from="192.0.2.9")
        assert (await stored(registry, told.id)).ingress_url == "http://192.0.2.9:7"


async def test_the_same_registration_twice_at_once_is_one_node(postgres: Postgres) -> None:
    """A worker whose call timed out asks again while the first is still under way. It must not be told that its own
    name is taken: that ends a worker for good."""
    async with open_registry(postgres.new_database()) as registry:
        token = await registry.token()
        told = await asyncio.gather(*(registry.register("barn", token) for _ in range(8)))
        assert len({each.id for each in told}) == 1
        async with registry.store.read() as tx:
            assert len(await nodes.list_(tx)) == 1
        with pytest.raises(Unauthenticated, match="used up"):
            await registry.register("byre", token)


async def test_a_deleted_machine_is_told_so_although_its_name_is_anothers_now(tmp_path: Path) -> None:
    async with open_registry(sqlite_url(tmp_path)) as registry:
        old = await registry.join("barn", pre_approved=True)
        await registry.admin.delete("barn")
        await registry.join("barn", enrolment="the new machine's")
        with pytest.raises(Gone):
            await registry.register("barn", old.node_token)
        with pytest.raises(Conflict):
            await registry.join("barn", enrolment="a third one's")


async def test_a_replacement_is_somebody_new_on_the_bus_and_in_every_other_respect(tmp_path: Path) -> None:
    async with open_registry(sqlite_url(tmp_path)) as registry:
        old = await registry.join("barn", pre_approved=True, gpu_vendor="nvidia", labels={"tier": "fast"})
        await registry.admin.merge_labels("barn", {"rack": "7"})
        await registry.admin.drain("barn")
        await registry.admin.open_for_replacement("barn")
        new = await registry.join("barn", pre_approved=True, enrolment="the new machine's")
        assert (new.id, new.status) == (old.id, "healthy")
        node = await stored(registry, new.id)
        assert not node.drained
        labels = await registry.admin.labels("barn")
        assert labels["rack"] == "7"
        assert "tier" not in labels
        assert "gpu.vendor" not in labels
        # No clock is compared: the old user is out for good, the new one is another.
        assert bus_user(old.nats_jwt) in await revoked_keys(registry)
        assert bus_user(new.nats_jwt) not in await revoked_keys(registry)
        assert old.bus is not None
        assert new.bus is not None
        assert old.bus.inbox == new.bus.inbox, "the id, and with it the subjects, are the same"


async def test_a_new_node_token_ends_what_the_old_one_was_given(tmp_path: Path) -> None:
    async with open_registry(sqlite_url(tmp_path)) as registry:
        first = await registry.join("barn", pre_approved=True)
        again = await registry.register("barn", first.node_token)
        assert bus_user(again.nats_jwt) == bus_user(first.nats_jwt), "coming back is no change"
        second = await registry.register("barn", "lost the token")  # proved by its enrolment
        assert second.node_token not in ("", first.node_token)
        assert await revoked_keys(registry) == {bus_user(first.nats_jwt)}
        await registry.admin.delete("barn")
        assert await revoked_keys(registry) == {bus_user(first.nats_jwt), bus_user(second.nats_jwt)}


def test_the_bus_user_follows_from_id_and_generation() -> None:
    from corral.bus.jwt import KeyKind, seed_from_bytes

    seed = seed_from_bytes(KeyKind.ACCOUNT, b"\1" * 32)
    keys = [node_user_key(seed, *of) for of in (("a",), ("a", ""), ("a", "1"), ("a", "2"), ("b", "1"))]
    assert keys[0] == keys[1]
    assert len(set(keys)) == 4
