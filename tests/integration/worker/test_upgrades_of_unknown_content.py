"""An upgrade from a file nobody knows the digest of: what the source has now counts, not what is here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.nats import NatsServer, nats_server
from tests.support.ordering import ordered_worker, tarred

__all__ = ["nats_server"]


def order_of(archive: Path) -> dict[str, Any]:
    """As a controller sends it that was given a uri and cannot look into the file: it lies on the node."""
    source = {"kind": "file", "uri": str(archive)}
    return {"backend": "mine", "variant": "mine", "uri": f"file://{archive}", "sources": [source]}


async def test_an_upgrade_without_a_digest_takes_what_the_source_has_now(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    archive = tmp_path / "mine.tar"
    archive.write_bytes(tarred({"run.sh": b"#!/bin/sh\nexit 1\n"}))
    async with ordered_worker(nats_server, tmp_path) as fleet:
        assert (await fleet.order("install", "op-1", order_of(archive)))["success"]
        first = (await fleet.backends())["mine"]
        archive.write_bytes(tarred({"run.sh": b"#!/bin/sh\nexit 2\n"}))
        result = await fleet.order("upgrade", "op-2", order_of(archive))
        now = (await fleet.backends())["mine"]
        assert (result["success"], result["digest"]) == (True, now["digest"])
        assert now["digest"] != first["digest"]
        assert now["previous"] == [first["digest"]]


async def test_where_the_source_has_the_same_the_date_shows_that_it_was_looked_at(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    # Without a digest that is all a controller can see an upgrade by.
    archive = tmp_path / "mine.tar"
    archive.write_bytes(tarred({"run.sh": b"#!/bin/sh\nexit 1\n"}))
    async with ordered_worker(nats_server, tmp_path) as fleet:
        assert (await fleet.order("install", "op-1", order_of(archive)))["success"]
        first = (await fleet.backends())["mine"]
        assert (await fleet.order("upgrade", "op-2", order_of(archive)))["success"]
        now = (await fleet.backends())["mine"]
        assert now["digest"] == first["digest"]
        assert now["installed_at"] != first["installed_at"]
