"""The service for releases: take a wheel, sign it, list what there is, and order the fleet to upgrade."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from msgspec import structs

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
    ReleaseView,
    UpgradeFleet,
)
from corral.controller.access.release_keys import COUNTER, ReleaseKeys
from corral.controller.distribution.own_wheel import OwnWheel
from corral.controller.operations.corral_operations import LOCALAI_NODE, list_covered, open_corral_upgrade
from corral.controller.operations.views import rfc3339
from corral.controller.releases.calls import ReleaseCalls
from corral.controller.releases.plan import first_of_each_class
from corral.controller.releases.signing import CorralWheel, add_release, next_counter
from corral.controller.rollouts.hardware_class import hardware_of
from corral.controller.rollouts.options import DEFAULT_MAX_PARALLEL, describe_soak, parse_max_parallel, parse_rollout
from corral.controller.runtime.change_feed import RULES, ChangeFeed
from corral.gallery.pypi.corral_wheel import read_contents
from corral.kit.errors import CorralError, Invalid, NotFound, Unreachable
from corral.kit.log import get_log
from corral.kit.threads import run_uncancelled
from corral.store.engine.schema_floor import SchemaFloor, read_floor, refuse_wheel
from corral.store.engine.transactions import Store
from corral.store.records import RolloutNodeBefore, Scope
from corral.store.tables import controllers, nodes, release_wheels, releases, revisions
from corral.store.tables.nodes import NodeOutline
from corral.store.tables.releases import Release

log = get_log(__name__)

NO_ANSWER = "it takes no such orders: it is away, or its version cannot upgrade itself yet"

FindScope = Callable[[str, str], Awaitable[Scope]]  # by node and selector


@dataclass(frozen=True)
class _NodeReply:
    outline: NodeOutline
    reply: UpgradeWorkerReply | CorralError
    version: str  # that it runs now
    before: RolloutNodeBefore


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
                next_counter=next_counter(found),
            )
        return ReleaseList(key, tuple(_view(each) for each in found))

    async def add(self, request: AddRelease, *, by: str) -> ReleaseView:
        """A wheel that was uploaded becomes the newest release. Raises NotFound, Invalid."""
        wheel = await self._read_uploaded(request.sha256)
        if wheel is None:
            raise NotFound("the wheel is not on this controller: upload it first")
        async with self._store.write() as tx:
            await revisions.hold(tx, COUNTER)
            await _refuse_older_schema(wheel.content, await read_floor(tx))
            release = await add_release(tx, self._keys, wheel, request.signed, by)
        self._feed.notify(COUNTER)
        return _view(release)

    async def _read_uploaded(self, sha256: str) -> CorralWheel | None:
        blob = self._uploaded.find(PREFIX + sha256)
        if blob is None:
            return None
        if blob.size > MAX_WHEEL_BYTES:
            raise Invalid(f"the wheel has {blob.size} bytes; a wheel of Corral has at most {MAX_WHEEL_BYTES}")
        content = await run_uncancelled(blob.path.read_bytes)
        return CorralWheel(sha256, (await run_uncancelled(read_contents, content, "the file")).version, content)

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
        settings = parse_rollout(soak=request.soak, max_errors=request.max_errors, min_requests=request.min_requests)
        scope = await self._find_scope(request.node, request.selector)
        release, wheel = await self._choose(request)
        if wheel is not None and not request.dry_run:
            async with self._store.write() as tx:
                await revisions.hold(tx, COUNTER)
                release = await add_release(tx, self._keys, wheel, "", by)
            self._feed.notify(COUNTER)
        own = await self._find_own_wheel()
        replies = await self._ask_nodes(release, scope, own)
        plan = await self._plan(release, replies, parallel, describe_soak(settings))
        if request.dry_run:
            return plan
        async with self._store.write() as tx:
            await revisions.hold(tx, RULES)
            if own is not None and any(each.before.digest == own.sha256 for each in replies):
                await release_wheels.put(tx, own.sha256, own.data)
            before = {each.outline.id: each.before for each in replies}
            operation = await open_corral_upgrade(tx, release, scope, parallel, by, settings=settings, before=before)
        log.info("upgrade of the fleet requested", version=release.version, operation=operation.id, by=by)
        self._feed.notify("operations", operation.id)
        return structs.replace(plan, operation=operation.id)

    async def _choose(self, request: UpgradeFleet) -> tuple[Release, CorralWheel | None]:
        """The release that is requested. With a wheel it is not signed yet: one that is new, or an older one, which is
        signed again with a higher counter because workers refuse the lower one. Raises NotFound, Invalid."""
        async with self._store.read() as tx:
            found, now = await releases.list_(tx), await tx.now()
            known = _find(found, request)
            content = await release_wheels.find(tx, known.sha256) if known is not None else None
            floor = await read_floor(tx)
        if known is not None and content is not None:
            await _refuse_older_schema(content, floor)
        if known is not None and known.counter == found[0].counter:
            return known, None
        if known is not None and content is None:
            raise NotFound(f"the wheel of {known.version} is not kept any more: give it with --wheel")
        if known is not None and content is not None:
            wheel: CorralWheel | None = CorralWheel(known.sha256, known.version, content)
        elif request.sha256:
            wheel = await self._read_uploaded(request.sha256)
        else:
            wheel = _wheel_of(await self._own_wheel()) if not request.counter else None
        if wheel is None or request.version not in ("", wheel.version):
            versions = ", ".join(dict.fromkeys(each.version for each in found)) or "none"
            raise NotFound(f"the controllers hold no such release; they have: {versions}. Give its wheel with --wheel")
        await _refuse_older_schema(wheel.content, floor)
        unsigned = Release(
            counter=next_counter(found),
            version=wheel.version,
            sha256=wheel.sha256,
            size_bytes=len(wheel.content),
            signed="",
            created_at=now,
            created_by="",
        )
        return unsigned, wheel

    async def _find_own_wheel(self) -> OwnWheel | None:
        try:
            return await self._own_wheel()
        except CorralError as error:
            log.warning("this controller cannot serve its own version", reason=error.message)
            return None

    async def _ask_nodes(self, release: Release, scope: Scope, own: OwnWheel | None) -> list[_NodeReply]:
        async with self._store.read() as tx:
            chosen = await list_covered(tx, scope)
            versions = {node.id: node.version for node in await nodes.list_(tx)}
            kept = await release_wheels.list_names(tx)
            wheels = [(each.sha256, each.version) for each in await releases.list_(tx) if each.sha256 in kept]
        if own is not None:
            wheels.append((own.sha256, own.version))
        replies = await asyncio.gather(*(self._ask(outline, release) for outline in chosen))
        return [
            _NodeReply(
                outline,
                reply,
                versions.get(outline.id, ""),
                _before(outline, reply, versions.get(outline.id, ""), wheels),
            )
            for outline, reply in zip(chosen, replies, strict=True)
        ]

    async def _plan(
        self, release: Release, replies: Sequence[_NodeReply], parallel: str, soak: str
    ) -> FleetUpgradePlan:
        async with self._store.read() as tx:
            live = await controllers.list_live(tx, within_s=self._live_for_s)
        going = [(each.outline.name, hardware_of(each.outline)) for each in replies if _goes(each.reply)]
        canaries = first_of_each_class(going)
        return FleetUpgradePlan(
            counter=release.counter,
            version=release.version,
            sha256=release.sha256,
            size_bytes=release.size_bytes,
            max_parallel=parallel,
            nodes=tuple(_planned(each, is_canary=each.outline.name in canaries) for each in replies),
            services=tuple(_services(release, live)),
            soak=soak,
        )

    async def _ask(self, outline: NodeOutline, release: Release) -> UpgradeWorkerReply | CorralError:
        if outline.protocol == 0:
            return UpgradeWorkerReply(state=UpgradeState.REFUSED, reason=LOCALAI_NODE)
        order = UpgradeWorker(op_id="plan", attempt=0, signed=release.signed, plan=True)
        try:
            reply = await self._calls.upgrade(outline.id, order)
        except CorralError as error:
            return error
        if release.signed or reply.state == UpgradeState.REFUSED:
            return reply
        # Nobody has signed it yet. Workers of earlier versions call that a failure; they refuse before they look at it.
        runs_it = bool(reply.program) and release.sha256.startswith(reply.program)
        return structs.replace(reply, state=UpgradeState.DONE if runs_it else UpgradeState.RUNNING)


async def _refuse_older_schema(content: bytes, floor: SchemaFloor | None) -> None:
    """Raises Invalid for a version whose controllers could not use the database any more."""
    if floor is not None:
        wheel = await run_uncancelled(read_contents, content, "the wheel")
        refuse_wheel(wheel.version, wheel.schema, floor)


def _wheel_of(own: OwnWheel) -> CorralWheel:
    return CorralWheel(own.sha256, own.version, own.data)


def _before(
    outline: NodeOutline, reply: UpgradeWorkerReply | CorralError, version: str, wheels: Sequence[tuple[str, str]]
) -> RolloutNodeBefore:
    """What the node runs now, with its wheel if there is one: by what the worker says, else by the version."""
    program = reply.program if isinstance(reply, UpgradeWorkerReply) else ""
    for sha256, known in wheels:
        if sha256.startswith(program) if program else known == version:
            return RolloutNodeBefore(hardware_of(outline), digest=sha256, version=known)
    return RolloutNodeBefore(hardware_of(outline), version=version)


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


def _goes(reply: UpgradeWorkerReply | CorralError) -> bool:
    return isinstance(reply, UpgradeWorkerReply) and reply.state == UpgradeState.RUNNING


def _planned(answer: _NodeReply, *, is_canary: bool) -> FleetUpgradeNode:
    outline, reply, version = answer.outline, answer.reply, answer.version
    node = FleetUpgradeNode(node=outline.name, version=version, action="upgrade", hardware_class=hardware_of(outline))
    if isinstance(reply, CorralError):
        is_away = outline.status not in ("healthy", "draining")
        reason = f"node {outline.status}" if is_away else reply.message
        if isinstance(reply, Unreachable) and not is_away:
            reason = NO_ANSWER
        return FleetUpgradeNode(node.node, version, "wait", node.hardware_class, False, reason)
    match reply.state:
        case UpgradeState.RUNNING:
            back = answer.before.version if answer.before.digest else ""
            return FleetUpgradeNode(node.node, version, "upgrade", node.hardware_class, is_canary, returns_to=back)
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
