"""Checks the running fleet through its API: readiness, clocks, controllers, bus, nodes, galleries, backends."""

from __future__ import annotations

import shlex
from collections.abc import AsyncIterator, Iterator, Sequence
from datetime import datetime
from typing import TYPE_CHECKING

from corral import __version__
from corral.cli.common.output import relative_time
from corral.cli.doctor.findings import Finding, fail, ok, warn
from corral.contract.admin import BackendMatrix, Cluster, GalleryView, NodeView
from corral.contract.messages.backends import TO_FIX
from corral.contract.why import WhyModel
from corral.kit.durations import format_duration
from corral.kit.errors import CorralError

if TYPE_CHECKING:
    from corral.client import Client

GOOD_SKEW_S, BAD_SKEW_S = 5.0, 300.0
MAX_NAMES = 5  # of nodes in one finding
_OF_A_FILE = " in the models folder: "


async def check_fleet(client: Client, now: datetime) -> AsyncIterator[Finding]:
    """Run the checks in order; stop at a problem that makes the rest impossible."""
    url = client.endpoint.url
    try:
        status, body = await client.status_of("/readyz")
    except CorralError as error:
        yield fail("gateway", error.message, "start the fleet with `corral up`, or give its URL with --url")
        return
    if status == 200:
        yield ok("gateway", f"{url} is ready")
    else:
        yield fail("gateway", f"{url} is not ready: {_words(body, status)}", "read <data>/logs/gateway.log")
    status, body = await client.status_of("/controller/readyz")
    if status == 200:
        yield ok("controller", "ready; the database answers")
    else:
        yield fail("controller", f"not ready: {_words(body, status)}", "read <data>/logs/controller.log")
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
        asking = [model.id for model in await client.models.list() if model.resume_streams]
        for finding in check_streams([await client.why.model(name) for name in asking]):
            yield finding
        for finding in check_galleries(await client.galleries()):
            yield finding
        for finding in check_backends(await client.backends.matrix()):
            yield finding
    except CorralError as error:
        yield fail("key", error.message, "give an admin or viewer key with --key or CORRAL_KEY")


def check_clock(there: datetime | None, here: datetime) -> Finding:
    if there is None:
        return warn("clock", "the controller does not report its time", "compare `date` on both machines")
    skew_s = (here - there).total_seconds()
    words = f"{format_duration(round(abs(skew_s)))} {'ahead of' if skew_s > 0 else 'behind'} that of the controller"
    if abs(skew_s) <= GOOD_SKEW_S:
        return ok("clock", "agrees with the controller")
    fix = "enable time synchronisation: timedatectl set-ntp true"
    return (fail if abs(skew_s) > BAD_SKEW_S else warn)("clock", f"the clock of this machine is {words}", fix)


def check_cluster(cluster: Cluster) -> Iterator[Finding]:
    live = [each for each in cluster.controllers if each.live]
    yield ok("controllers", f"{len(live)} live, version {cluster.version}, {cluster.store}")
    for each in cluster.controllers:
        if not each.live:
            fix = "start the controller again; the fleet forgets a removed one after a week"
            yield warn("controllers", f"the controller on {each.host} does not respond, last seen {each.seen_at}", fix)
    if cluster.version != __version__:
        yield warn(
            "version",
            f"the fleet runs {cluster.version}, this command is {__version__}",
            f"install {cluster.version} here",
        )
    for each in live:
        if each.version != cluster.version:
            yield warn(
                "controllers", f"the controller on {each.host} runs {each.version}", f"upgrade it to {cluster.version}"
            )
    if not cluster.bus.get("connected"):
        yield fail("bus", "the controller is not connected to the bus", "read <data>/logs/bus.log and controller.log")
    elif cluster.bus.get("isolation") is False:
        yield warn(
            "bus",
            "all nodes share one credential: each can read and write the messages of the others",
            "give the controller an account seed instead of --bus-shared-credentials",
        )
    else:
        yield ok("bus", "connected; each node can use only its own subjects")
    if cluster.bus.get("connected") and cluster.bus.get("revocation") is False:
        yield warn(
            "bus",
            "the credential of a deleted node works until it expires",
            "give the controller the operator's key, or shorten --bus-credential-ttl",
        )

    for notice in cluster.notices:
        if _OF_A_FILE in notice:  # the checks above report the other notices, each with its fix
            yield warn("models", notice, "correct or remove the file")


def check_galleries(galleries: tuple[GalleryView, ...]) -> Iterator[Finding]:
    unread = [each for each in galleries if each.notice]
    for each in unread:
        setting = "--model-galleries" if each.kind == "models" else "--galleries"
        fix = f"check that the machine of the controller can reach it, or change {setting}"
        yield warn("gallery", f"{each.kind}: {each.notice.removesuffix('.')}", fix)
    if galleries and not unread:
        yield ok("galleries", f"{len(galleries)} can be read")


def check_nodes(nodes: tuple[NodeView, ...]) -> Iterator[Finding]:
    healthy = 0
    for node in nodes:
        if node.status == "pending":
            yield warn("node", f"{node.name} needs approval", f"corral nodes approve {shlex.quote(node.name)}")
        elif node.status in ("offline", "unhealthy"):
            reason = node.status_reason or f"last heartbeat {relative_time(node.last_heartbeat)}"
            yield warn(
                "node", f"{node.name} is {node.status}: {reason}", "start the worker on that machine, and read its log"
            )
        elif node.ingress_error:
            yield fail(
                "node",
                f"{node.name}: {node.ingress_error}",
                "open the port in its firewall, or start its worker with --advertise HOST:PORT",
            )
        elif node.bus_down:
            yield fail("node", f"{node.name} cannot reach the bus", "open the port of the bus for that machine")
        else:
            healthy += 1
    yield ok("nodes", f"{healthy} of {len(nodes)} without problems")


def check_backend_users(nodes: tuple[NodeView, ...]) -> Iterator[Finding]:
    """Nodes whose backends can read the credentials of the worker, grouped by cause."""
    causes: dict[tuple[str, str], list[str]] = {}
    for node in nodes:
        if node.backend_user_warning and node.status != "pending":
            causes.setdefault((node.backend_user_warning, node.backend_user_fix), []).append(node.name)
    for (warning, fix), names in causes.items():
        more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
        yield warn(
            "backends", f"{', '.join(names[:MAX_NAMES])}{more}: {warning}", f"on that machine: {fix}" if fix else ""
        )


def check_streams(models: Sequence[WhyModel]) -> Iterator[Finding]:
    """Models whose definition asks that broken streams are continued, where a backend cannot."""
    for why in models:
        if why.streams_limited:
            yield warn(
                "streams",
                f"{why.model}: streams that break off are {why.streams}",
                f"use a backend that can, or corral models edit {shlex.quote(why.model)} --set resume_streams=false",
            )


def check_backends(matrix: BackendMatrix) -> Iterator[Finding]:
    """Backends that cannot be installed or cannot run on a node."""
    for row in matrix.backends:
        for node in matrix.nodes:
            cell = row.nodes.get(node.id)
            if cell is None:
                continue
            if cell.problem:
                yield fail("backend", *_cause_and_fix(f"{row.backend} cannot run on {node.name}", cell.problem))
            intent = cell.intent
            if intent is not None and intent.reason and (intent.failures or intent.stage == "parked"):
                problem = f"{row.backend}: {intent.kind} fails on {node.name}"
                parked = intent.stage == "parked"
                yield (fail if parked else warn)("backend", *_cause_and_fix(problem, intent.reason, intent.operation))


def _cause_and_fix(what: str, reason: str, operation: str = "") -> tuple[str, str]:
    """Split a reason of a worker: the command that fixes it, if any, follows an arrow."""
    line = reason.partition("\n")[0]
    cause, _, command = line.partition(TO_FIX)
    details = f"corral why op {operation}" if operation else ""
    return f"{what}: {cause}", f"run on that machine: {command}" if command else details


def _words(body: bytes, status: int) -> str:
    return " ".join(body.decode("utf-8", errors="replace").split())[:200] or f"HTTP {status}"
