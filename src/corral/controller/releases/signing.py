"""Makes releases of wheels: signs them, and keeps the wheels that workers may need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from corral.contract.releases import ReleaseOrder
from corral.controller.access.release_keys import COUNTER, ReleaseKeys
from corral.kit.errors import Invalid
from corral.kit.log import get_log
from corral.store.engine.transactions import Transaction
from corral.store.tables import release_wheels, releases, revisions, rollouts
from corral.store.tables.releases import Release

log = get_log(__name__)

KEPT_WHEELS = 5  # of the last releases; each has a few megabytes


@dataclass(frozen=True)
class CorralWheel:
    sha256: str
    version: str
    content: bytes


async def add_release(tx: Transaction, keys: ReleaseKeys, wheel: CorralWheel, signed: str, by: str) -> Release:
    """The wheel as the newest release; the same one if it is that already. `signed` empty: the controllers sign. The
    caller holds the counter of releases. Raises Invalid."""
    found = await releases.list_(tx)
    order = ReleaseOrder(
        counter=next_counter(found), version=wheel.version, sha256=wheel.sha256, size_bytes=len(wheel.content)
    )
    if not signed and found and found[0].sha256 == wheel.sha256:
        return found[0]
    if signed:
        order = _check_signed(await keys.verify(tx, signed), order)
    else:
        signed = await keys.sign(tx, order)
    release = Release(
        counter=order.counter,
        version=order.version,
        sha256=order.sha256,
        size_bytes=order.size_bytes,
        signed=signed,
        created_at=await tx.now(),
        created_by=by,
    )
    await releases.insert(tx, release)
    await release_wheels.put(tx, wheel.sha256, wheel.content)
    kept = list(dict.fromkeys(each.sha256 for each in (release, *found)))[:KEPT_WHEELS]
    former = {before.digest for rollout in await rollouts.list_of_corral(tx) for before in rollout.nodes.values()}
    await release_wheels.keep_only(tx, {*kept, *former})
    await revisions.bump(tx, COUNTER)
    log.info("release signed", version=release.version, counter=release.counter, by=by)
    return release


def next_counter(found: Sequence[Release]) -> int:
    return found[0].counter + 1 if found else 1


def _check_signed(signed: ReleaseOrder, expected: ReleaseOrder) -> ReleaseOrder:
    if (signed.version, signed.sha256, signed.size_bytes) != (expected.version, expected.sha256, expected.size_bytes):
        raise Invalid(
            f"the signature is of {signed.version} with the SHA-256 {signed.sha256[:16]}…, and the wheel is "
            f"{expected.version} with {expected.sha256[:16]}…: sign this wheel"
        )
    if signed.counter < expected.counter:
        raise Invalid(
            f"the signature has the counter {signed.counter}, and {expected.counter} is the lowest that is free: "
            f"sign again with --counter {expected.counter}"
        )
    return signed
