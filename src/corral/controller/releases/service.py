"""The service for releases: take a wheel, sign it, list what there is, and order the fleet to upgrade."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from corral.blobs.digests import PREFIX
from corral.blobs.store import BlobStore
from corral.contract.messages.releases import UpgradeState, UpgradeWorker, UpgradeWorkerReply
from corral.contract.releases import (
    MAX_WHEEL_BYTES,
    AddRelease,
    ChangeReleaseKey,
    FleetUpgradeNode,
    FleetUpgradePlan,
    FleetUpgradeService,
    ReleaseKeyView,
    ReleaseList,
    ReleaseOrder,
    ReleaseView,
    UpgradeFleet,
)
from corral.controller.access.release_keys import COUNTER, ReleaseKeys
from corral.controller.distribution.own_wheel import OwnWheel
from corral.controller.operations.corral_operations import LOCALAI_NODE, list_covered, open_corral_upgrade
from corral.controller.operations.views import rfc3339
from corral.controller.releases.calls import ReleaseCalls
from corral.controller.releases.plan import first_of_each_class
from corral.controller.rollouts.hardware_class import hardware_of
from corral.controller.rollouts.options import DEFAULT_MAX_PARALLEL, parse_max_parallel
from corral.controller.runtime.change_feed import RULES, ChangeFeed
from corral.gallery.pypi.corral_wheel import read_contents
from corral.kit.errors import CorralError, Invalid, NotFound, Unreachable
from corral.kit.log import get_log
from corral.kit.threads import run_uncancelled
from corral.store.engine.transactions import Store, Transaction
from corral.store.records import Scope
from corral.store.tables import controllers, nodes, release_wheels, releases, revisions
from corral.store.tables.nodes import NodeOutline
from corral.store.tables.releases import Release

log = get_log(__name__)

KEPT_WHEELS = 5  # of the last releases; each has a few megabytes
NO_ANSWER = "it takes no such orders: it is away, or its version cannot upgrade itself yet"

FindScope = Callable[[str, str], Awaitable[Scope]]  # by node and selector


@dataclass(frozen=True)
class _Wheel:
    sha256: str
    version: str
    content: bytes


class Releases:
    def __init__(
        self,
        store: Store,
        keys: ReleaseKeys,
        calls: ReleaseCalls,
        feed: ChangeFeed,
        uploaded: BlobStore,
        own_wheel: Callable[[], Awaitable[OwnWheel]],
        find_scope: FindScope,
        *,
        live_for_s: float,
    ) -> None:
        """`uploaded`: where uploads are. `own_wheel`: of the version that this controller runs."""
        self._store = store
        self._keys = keys
        self._calls = calls
        self._feed = feed
        self._uploaded = uploaded
        self._own_wheel = own_wheel
        self._find_scope = find_scope
        self._live_for_s = live_for_s

    async def list_(self) -> ReleaseList:
        async with self._store.read() as tx:
            found = await releases.list_(tx)
            key = ReleaseKeyView(
                public_key=self._keys.public_key,
                is_held=await self._keys.is_held(tx),
                next_counter=_next_counter(found),
            )
        return ReleaseList(key, tuple(_view(each) for each in found))

    async def add(self, request: AddRelease, *, by: str) -> ReleaseView:
        """A wheel that was uploaded becomes the newest release. Raises NotFound, Invalid."""
        blob = self._uploaded.find(PREFIX + request.sha256)
        if blob is None:
            raise NotFound("the wheel is not on this controller: upload it first")
        if blob.size > MAX_WHEEL_BYTES:
            raise Invalid(f"the wheel has {blob.size} bytes; a wheel of Corral has at most {MAX_WHEEL_BYTES}")
        content = await run_uncancelled(blob.path.read_bytes)
        wheel = _Wheel(request.sha256, (await run_uncancelled(read_contents, content, "the file")).version, content)
        async with self._store.write() as tx:
            await revisions.hold(tx, COUNTER)
            release = await self._release(tx, wheel, request.signed, by)
        self._feed.notify(COUNTER)
        return _view(release)

    async def change_key(self, request: ChangeReleaseKey, *, by: str) -> ReleaseList:
        if bool(request.public_key) is request.is_new:
            raise Invalid("name the public_key, or set is_new to have the controllers make a key and keep it")
        await self._keys.change(request.public_key, request.proof, is_lost=request.is_lost, by=by)
        async with self._store.write() as tx:
            await revisions.bump(tx, COUNTER)
        self._feed.notify(COUNTER)
        return await self.list_()

    async def upgrade(self, request: UpgradeFleet, *, by: str) -> FleetUpgradePlan:
        """The plan, and unless it is a dry run the operation that carries it out."""
        parallel = parse_max_parallel(request.max_parallel) if request.max_parallel else DEFAULT_MAX_PARALLEL
        scope = await self._find_scope(request.node, request.selector)
        own = await self._read_own(request)
        async with self._store.write() as tx:
            await revisions.hold(tx, COUNTER)
            release = await self._choose(tx, request, own, by)
        self._feed.notify(COUNTER)
        plan = await self._plan(release, scope, parallel)
        if request.dry_run:
            return plan
        async with self._store.write() as tx:
            await revisions.hold(tx, RULES)
            operation = await open_corral_upgrade(tx, release, scope, parallel, by)
        log.info("upgrade of the fleet requested", version=release.version, operation=operation.id, by=by)
        self._feed.notify("operations", operation.id)
        return FleetUpgradePlan(
            counter=plan.counter,
            version=plan.version,
            sha256=plan.sha256,
            size_bytes=plan.size_bytes,
            max_parallel=plan.max_parallel,
            nodes=plan.nodes,
            services=plan.services,
            operation=operation.id,
        )

    async def _read_own(self, request: UpgradeFleet) -> OwnWheel | None:
        """The wheel of the version that the controllers run, if that is requested: by its name, or without any. Raises
        NotFound for a release that is unknown."""
        async with self._store.read() as tx:
            found = await releases.list_(tx)
        if _find(found, request) is not None:
            return None
        own = await self._own_wheel() if not (request.counter or request.sha256) else None
        if own is None or request.version not in ("", own.version):
            known = ", ".join(dict.fromkeys(each.version for each in found)) or "none"
            raise NotFound(f"the controllers hold no such release; they have: {known}. Give its wheel with --wheel")
        return own

    async def _choose(self, tx: Transaction, request: UpgradeFleet, own: OwnWheel | None, by: str) -> Release:
        """The release that is ordered: the newest one, or an older wheel that is signed again with a higher counter,
        because workers refuse the lower one."""
        if own is not None:
            return await self._release(tx, _Wheel(own.sha256, own.version, own.data), "", by)
        found = await releases.list_(tx)
        wanted = _find(found, request)
        assert wanted is not None  # releases are never removed
        if wanted.counter == found[0].counter:
            return wanted
        content = await release_wheels.find(tx, wanted.sha256)
        if content is None:
            raise NotFound(f"the wheel of {wanted.version} is not kept any more: give it with --wheel")
        return await self._release(tx, _Wheel(wanted.sha256, wanted.version, content), "", by)

    async def _release(self, tx: Transaction, wheel: _Wheel, signed: str, by: str) -> Release:
        found = await releases.list_(tx)
        order = ReleaseOrder(
            counter=_next_counter(found), version=wheel.version, sha256=wheel.sha256, size_bytes=len(wheel.content)
        )
        if not signed and found and found[0].sha256 == wheel.sha256:
            return found[0]
        if signed:
            order = _check_signed(await self._keys.verify(tx, signed), order)
        else:
            signed = await self._keys.sign(tx, order)
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
        await release_wheels.keep_only(tx, kept)
        await revisions.bump(tx, COUNTER)
        log.info("release signed", version=release.version, counter=release.counter, by=by)
        return release

    async def _plan(self, release: Release, scope: Scope, parallel: str) -> FleetUpgradePlan:
        async with self._store.read() as tx:
            chosen = await list_covered(tx, scope)
            versions = {node.id: node.version for node in await nodes.list_(tx)}
            live = await controllers.list_live(tx, within_s=self._live_for_s)
        replies = await asyncio.gather(*(self._ask(outline, release) for outline in chosen))
        rows = list(zip(chosen, replies, strict=True))
        going = [(outline.name, hardware_of(outline)) for outline, reply in rows if _goes(reply)]
        canaries = first_of_each_class(going)
        return FleetUpgradePlan(
            counter=release.counter,
            version=release.version,
            sha256=release.sha256,
            size_bytes=release.size_bytes,
            max_parallel=parallel,
            nodes=tuple(
                _planned(outline, reply, versions.get(outline.id, ""), is_canary=outline.name in canaries)
                for outline, reply in rows
            ),
            services=tuple(_services(release, live)),
        )

    async def _ask(self, outline: NodeOutline, release: Release) -> UpgradeWorkerReply | CorralError:
        if outline.protocol == 0:
            return UpgradeWorkerReply(state=UpgradeState.REFUSED, reason=LOCALAI_NODE)
        order = UpgradeWorker(op_id="plan", attempt=0, signed=release.signed, plan=True)
        try:
            return await self._calls.upgrade(outline.id, order)
        except CorralError as error:
            return error


def _find(found: Sequence[Release], request: UpgradeFleet) -> Release | None:
    """The newest that matches."""
    named = [bool(request.counter), bool(request.version), bool(request.sha256)]
    if sum(named) > 1:
        raise Invalid("name a release by its counter, its version or its wheel, not by several")
    return next(
        (
            each
            for each in found
            if (request.counter and each.counter == request.counter)
            or (request.version and each.version == request.version)
            or (request.sha256 and each.sha256 == request.sha256)
        ),
        None,
    )


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


def _next_counter(found: Sequence[Release]) -> int:
    return found[0].counter + 1 if found else 1


def _goes(reply: UpgradeWorkerReply | CorralError) -> bool:
    return isinstance(reply, UpgradeWorkerReply) and reply.state == UpgradeState.RUNNING


def _planned(
    outline: NodeOutline, reply: UpgradeWorkerReply | CorralError, version: str, *, is_canary: bool
) -> FleetUpgradeNode:
    node = FleetUpgradeNode(node=outline.name, version=version, action="upgrade", hardware_class=hardware_of(outline))
    if isinstance(reply, CorralError):
        is_away = outline.status not in ("healthy", "draining")
        reason = f"node {outline.status}" if is_away else reply.message
        if isinstance(reply, Unreachable) and not is_away:
            reason = NO_ANSWER
        return FleetUpgradeNode(node.node, version, "wait", node.hardware_class, False, reason)
    match reply.state:
        case UpgradeState.RUNNING:
            return FleetUpgradeNode(node.node, version, "upgrade", node.hardware_class, is_canary)
        case UpgradeState.DONE:
            return FleetUpgradeNode(node.node, version, "none", node.hardware_class, False, "it runs this version")
        case _:
            return FleetUpgradeNode(node.node, version, "skip", node.hardware_class, False, reply.reason)


def _services(release: Release, live: Sequence[controllers.Controller]) -> list[FleetUpgradeService]:
    """Controllers of other versions, one after the other, and before them the gateways that run apart."""
    others = sorted((each for each in live if each.version != release.version), key=lambda each: each.host)
    if not others:
        return []
    install = f"uv tool install --force corral-{release.version}-py3-none-any.whl"
    found = [
        FleetUpgradeService(
            role="gateway",
            name="each that runs apart",
            version="",
            command=f"{install}, then restart `corral gateway`",
            reason="gateways take no orders; one after the other, so that clients reach the others meanwhile",
        )
    ]
    return found + [
        FleetUpgradeService(
            role="controller",
            name=each.host,
            version=each.version,
            command=f"{install}, then restart `corral up` or `corral controller`",
            reason="after the gateways. Not where `corral up` was installed with `corral fleet install`: there gateway "
            "and controller follow when this operation has ended",
        )
        for each in others
    ]


def _view(release: Release) -> ReleaseView:
    return ReleaseView(
        counter=release.counter,
        version=release.version,
        sha256=release.sha256,
        size_bytes=release.size_bytes,
        signed=release.signed,
        created_at=rfc3339(release.created_at),
        created_by=release.created_by,
    )
