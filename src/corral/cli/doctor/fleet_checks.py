"""The running fleet, by its own API: does it answer, do clocks agree, what do controllers and nodes complain about?"""

from __future__ import annotations

import shlex
from collections.abc import AsyncIterator, Iterator
from datetime import datetime
from typing import TYPE_CHECKING

from corral import __version__
from corral.cli.doctor.findings import Finding, fail, ok, warn
from corral.cli.output import ago
from corral.contract.admin import BackendMatrix, Cluster, GalleryView, NodeView
from corral.contract.messages.backends import TO_FIX
from corral.kit.durations import format_duration
from corral.kit.errors import CorralError

if TYPE_CHECKING:
    from corral.client import Client

GOOD_SKEW_S, BAD_SKEW_S = 5.0, 300.0
MAX_NAMES = 5  # of nodes in one line
_OF_A_FILE = " in the models folder: "


async def check_fleet(client: Client, now: datetime) -> AsyncIterator[Finding]:
    """Stops where nothing more can be learned."""
    url = client.endpoint.url
    try:
        status, body = await client.status_of("/readyz")
    except CorralError as error:
        yield fail("gateway", error.message, "start the fleet with `corral up`, or give --url")
        return
    if status == 200:
        yield ok("gateway", f"{url} is ready")
    else:
        yield fail("gateway", f"{url}: {_words(body, status)}", "see <data>/logs/gateway.log")
    status, body = await client.status_of("/controller/readyz")
    if status == 200:
        yield ok("controller", "ready, its database answers")
    else:
        yield fail("controller", _words(body, status), "see <data>/logs/controller.log")
        return
    try:
        me = await client.me()
        yield ok("key", f"{me.name or me.key_id}, role {me.role}")
        yield check_clock(await client.server_time(), now)
        for finding in check_cluster(await client.cluster()):
            yield finding
        for finding in check_nodes(await client.nodes.list()):
            yield finding
        for finding in check_backend_users(await client.nodes.list()):
            yield finding
        for finding in check_galleries(await client.galleries()):
            yield finding
        for finding in check_backends(await client.backends.matrix()):
            yield finding
    except CorralError as error:
        yield fail("key", error.message, "give an admin or viewer key with --key or CORRAL_KEY")


def check_clock(there: datetime | None, here: datetime) -> Finding:
    if there is None:
        return warn("clock", "the controller does not say what time it has", "compare `date` on both machines")
    skew_s = (here - there).total_seconds()
    words = f"{format_duration(round(abs(skew_s)))} {'ahead of' if skew_s > 0 else 'behind'} the controller's"
    if abs(skew_s) <= GOOD_SKEW_S:
        return ok("clock", "agrees with the controller's")
    mend = "switch time synchronisation on: timedatectl set-ntp true"
    return (fail if abs(skew_s) > BAD_SKEW_S else warn)("clock", f"this clock is {words}", mend)


def check_cluster(cluster: Cluster) -> Iterator[Finding]:
    live = [each for each in cluster.controllers if each.live]
    yield ok("controllers", f"{len(live)} live, version {cluster.version}, {cluster.store}")
    for each in cluster.controllers:
        if not each.live:
            mend = "start it again; one that is gone for good is forgotten after a week"
            yield warn("controllers", f"{each.host} is silent, last seen {each.seen_at}", mend)
    if cluster.version != __version__:
        yield warn("version", f"the fleet runs {cluster.version}, this is {__version__}", "use the same version")
    for each in live:
        if each.version != cluster.version:
            yield warn("controllers", f"{each.host} runs {each.version}", f"upgrade it to {cluster.version}")
    if not cluster.bus.get("connected"):
        yield fail("bus", "the controller is not connected to it", "see <data>/logs/bus.log and controller.log")
    elif cluster.bus.get("isolation") is False:
        yield warn(
            "bus",
            "shared credentials: every node can read and write every other node's messages",
            "give the controller an account seed instead of --bus-shared-credentials",
        )
    else:
        yield ok("bus", "connected; each node may only use its own subjects")
    if cluster.bus.get("connected") and cluster.bus.get("revocation") is False:
        yield warn(
            "bus",
            "a deleted node's credential works until it expires",
            "give the controller the operator's key, or shorten --bus-credential-ttl",
        )

    for notice in cluster.notices:
        if _OF_A_FILE in notice:  # the others are told above, each with its cure
            yield warn("models", notice, "mend or remove the file")


def check_galleries(galleries: tuple[GalleryView, ...]) -> Iterator[Finding]:
    unread = [each for each in galleries if each.notice]
    for each in unread:
        setting = "--model-galleries" if each.kind == "models" else "--galleries"
        mend = f"see whether the controller's machine reaches it, or change {setting}"
        yield warn("gallery", f"{each.kind}: {each.notice.removesuffix('.')}", mend)
    if galleries and not unread:
        yield ok("galleries", f"{len(galleries)} read")


def check_nodes(nodes: tuple[NodeView, ...]) -> Iterator[Finding]:
    well = 0
    for node in nodes:
        if node.status == "pending":
            yield warn("node", f"{node.name} waits for approval", f"corral nodes approve {shlex.quote(node.name)}")
        elif node.status in ("offline", "unhealthy"):
            reason = node.status_reason or f"last heard {ago(node.last_heartbeat)}"
            yield warn("node", f"{node.name} is {node.status}: {reason}", "start its worker; see its log")
        elif node.ingress_error:
            yield fail(
                "node",
                f"{node.name}: {node.ingress_error}",
                "open the port in its firewall, or start its worker with --advertise HOST:PORT",
            )
        elif node.bus_down:
            yield fail("node", f"{node.name} cannot reach the bus", "open the bus port towards it")
        else:
            well += 1
    yield ok("nodes", f"{well} of {len(nodes)} well")


def check_backend_users(nodes: tuple[NodeView, ...]) -> Iterator[Finding]:
    """Nodes whose backends could read the worker's credentials; those of one cause together."""
    causes: dict[tuple[str, str], list[str]] = {}
    for node in nodes:
        if node.backend_user_warning and node.status != "pending":
            causes.setdefault((node.backend_user_warning, node.backend_user_fix), []).append(node.name)
    for (warning, fix), names in causes.items():
        more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
        yield warn("backends", f"{', '.join(names[:MAX_NAMES])}{more}: {warning}", f"there: {fix}" if fix else "")


def check_backends(matrix: BackendMatrix) -> Iterator[Finding]:
    """Backends that a node should have and cannot get, or has and cannot run."""
    for row in matrix.backends:
        for node in matrix.nodes:
            cell = row.nodes.get(node.id)
            if cell is None:
                continue
            if cell.problem:
                yield fail("backend", *_cause_and_fix(f"{row.backend} cannot run on {node.name}", cell.problem))
            intent = cell.intent
            if intent is not None and intent.reason and (intent.failures or intent.stage == "parked"):
                told = f"{row.backend}: {intent.kind} fails on {node.name}"
                parked = intent.stage == "parked"
                yield (fail if parked else warn)("backend", *_cause_and_fix(told, intent.reason, intent.operation))


def _cause_and_fix(what: str, reason: str, operation: str = "") -> tuple[str, str]:
    """Workers write the command that helps after an arrow, where there is one."""
    line = reason.partition("\n")[0]
    cause, _, command = line.partition(TO_FIX)
    look = f"corral why op {operation}" if operation else ""
    return f"{what}: {cause}", f"run there: {command}" if command else look


def _words(body: bytes, status: int) -> str:
    return " ".join(body.decode("utf-8", errors="replace").split())[:200] or f"HTTP {status}"
