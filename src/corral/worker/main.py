"""The worker's composition root: read this first. What is opened here is closed here, in reverse."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import uuid
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import uvloop
from msgspec.structs import replace

from corral.contract.messages.nodes import NodeRegistered, RegisterNode
from corral.kit.backoff import Backoff
from corral.kit.clock import Clock, SystemClock
from corral.kit.hosts import is_in_clear
from corral.kit.log import configure_logging, get_log, mask_secrets
from corral.kit.process import freeze_gc_after_start
from corral.kit.settings import shown
from corral.kit.tasks import Wake
from corral.worker.addresses import listen_on, tell
from corral.worker.agent.agent import Agent
from corral.worker.agent.bus_access import BusOpener
from corral.worker.agent.certificate import IngressCertificate
from corral.worker.agent.controller import open_controller
from corral.worker.agent.describe import describe
from corral.worker.agent.identity import IdentityFile, hold_folder
from corral.worker.agent.joining import Joining
from corral.worker.agent.leaving import at_most, stop_backends
from corral.worker.agent.machine import Machine
from corral.worker.agent.peer import CORRAL, Peer, localai_peer
from corral.worker.agent.server_clock import ServerClock
from corral.worker.agent.standing import Standing
from corral.worker.agent.stop import CannotGoOn
from corral.worker.agent.trust import settle_trust
from corral.worker.agent.waiting import alongside, unless_set
from corral.worker.backend_user import settle_backend_user
from corral.worker.backends import open_backends
from corral.worker.handover import HandOver, Successors, inherit, is_successor
from corral.worker.hardware.probe import HardwareProbe
from corral.worker.ingress.bridges import open_request_files
from corral.worker.ingress.door import Door
from corral.worker.ingress.load import LoadReports
from corral.worker.ingress.server import Ingress
from corral.worker.ingress.tokens import TokenCheck
from corral.worker.metrics import WorkerMetrics
from corral.worker.remembered import remember
from corral.worker.settings import WorkerSettings
from corral.worker.supervisor.supervisor import Supervisor

log = get_log(__name__)
THREADS = 64


async def serve(
    settings: WorkerSettings,
    *,
    clock: Clock | None = None,
    stopped: asyncio.Event | None = None,
    hurry: asyncio.Event | None = None,
    succeeds: bool = False,
    given: Mapping[str, str | bool] | None = None,
) -> bool:
    """Join, work, and leave in order once `stopped` is set; sooner once `hurry` is. `succeeds`: take over from the
    worker at work. `given`: settings of this start to keep for later ones. True when a successor has taken over from
    this one. Raises `CannotGoOn`."""
    clock, stopped, hurry = clock or SystemClock(), stopped or asyncio.Event(), hurry or asyncio.Event()
    inherited = await inherit(settings.data, timeout_s=settings.reload_timeout_s) if succeeds else None
    with hold_folder(settings.data) as lock:
        remember(settings.data, given or {})
        make_folders(settings)
        user = settle_backend_user(settings)
        identity = IdentityFile.open(settings.data, name=settings.name)
        url = identity.settle_controller(settings.controller)
        if is_in_clear(url):
            log.warning("the controller's URL is plain http: tokens and credentials can be read on the way", url=url)
        metrics, server_clock = WorkerMetrics(), ServerClock(clock)
        standing = Standing(boot_id=str(uuid.uuid4()), name=identity.current.name)
        tokens = TokenCheck(server_clock.now)
        tokens.trust(identity.current.signing_key, identity.current.node_id)
        wake = Wake()  # of the next heartbeat
        processes = settings.supervisor_settings(
            settings.data, user=user.name, home=user.home, backends=settings.backends_dir
        )
        supervisor = Supervisor(processes, clock=clock, changed=wake.set)
        files = open_request_files(settings.data / "requests", user.name)
        door = Door(standing, tokens, metrics, supervisor, files)
        certificate = IngressCertificate(settings.data)
        retry = Backoff(settings.retry_first_s, settings.retry_cap_s)
        join_token = read_join_token(settings)
        probe = HardwareProbe(settings.models_dir, env=os.environ)
        machine = Machine(probe, clock, refresh_every_s=settings.heartbeat_interval_s)
        supervisor.gauge = probe.gauge(lambda: machine.report.devices)

        def hand_over_soon() -> None:
            if not stopped.is_set():  # else it is on its way out, and its successor is told so
                standing.handing_over = True
                stopped.set()

        async with (
            # Before the ingress serves: nobody shall hear that what runs is gone.
            adopting(supervisor, standing, leave_timeout_s=settings.leave_timeout_s),
            Ingress(
                listen_on(settings, url),
                door,
                tokens,
                certificate,
                server_clock.now,
                shared_token=join_token,
                inherited=inherited.listeners if inherited is not None else (),
            ) as ingress,
            HandOver(settings.data, asked=hand_over_soon) as handover,
        ):
            if inherited is not None:
                inherited.serving()
            trust = await unless_set(
                stopped,
                settle_trust(settings.ca, url, identity, timeout_s=settings.http_timeout_s, backoff=retry, clock=clock),
            )
            async with open_controller(url, timeout_s=settings.http_timeout_s, trust=trust) as api:

                def registration() -> RegisterNode:
                    told = tell(settings, port=ingress.port, host_name=socket.gethostname())
                    offer = describe(settings, machine.report, told, ingress.offer(told.advertise))
                    return replace(
                        offer,
                        backend_user=user.shown,
                        backend_user_warning=user.warning,
                        backend_user_fix=user.fix,
                    )

                async def end_replicas() -> None:
                    """The controller does not count what runs here for a node that is gone, and the new node may wait
                    for its approval for days."""
                    await at_most(settings.drain_timeout_s, hurry, ingress.wait_idle())
                    await supervisor.stop_all()

                joining = Joining(
                    api,
                    identity,
                    standing,
                    metrics,
                    join_token=join_token,
                    describe=registration,
                    backoff=retry,
                    approval=Backoff(settings.approval_poll_s, settings.approval_poll_s),
                    require_jwt=settings.bus_require_auth and not settings.bus_jwt,
                    server_clock=server_clock,
                    on_deleted=end_replicas,
                    clock=clock,
                )

                def peer_of(reply: NodeRegistered) -> Peer:
                    if reply.protocol > 0:
                        return CORRAL
                    told = tell(settings, port=ingress.port, host_name=socket.gethostname())
                    return localai_peer(settings, told_address=told.address, token=join_token)

                async def fresh_blob_token() -> str:
                    return (await joining.renew()).blob_token

                await unless_set(stopped, machine.look())
                async with (
                    alongside(machine.run()),
                    open_backends(
                        settings,
                        supervisor,
                        door.replicas,
                        lambda: machine.report,
                        clock=clock,
                        env=os.environ,
                        metrics=metrics,
                        wake=wake,
                        controller=url,
                        fresh_blob_token=fresh_blob_token,
                        trust=trust,
                    ) as backends,
                ):
                    agent = Agent(
                        settings=settings,
                        api=api,
                        joining=joining,
                        machine=machine,
                        standing=standing,
                        server_clock=server_clock,
                        metrics=metrics,
                        open_bus=BusOpener(settings, clock),
                        ingress=ingress,
                        supervisor=supervisor,
                        load=LoadReports(door.inflight, boot_id=standing.boot_id, interval_s=settings.load_interval_s),
                        backends=backends,
                        peer_of=peer_of,
                        clock=clock,
                    )
                    await agent.run(stopped, hurry)
            if standing.handing_over:
                door.replicas.freeze(supervisor.serving())
                await supervisor.let_go()
                lock.release()
                if not await handover.give(ingress.descriptors(), timeout_s=settings.reload_timeout_s):
                    raise CannotGoOn("the worker that should take over did not: start this one again, it will adopt")
                await ingress.retire(settings.reload_drain_s, hurry)
            return standing.handing_over


@contextlib.asynccontextmanager
async def adopting(supervisor: Supervisor, standing: Standing, *, leave_timeout_s: float) -> AsyncIterator[None]:
    """With what an earlier worker left running. Leaving lets go of it: whoever wants it ended says so. A worker that
    gives up ends it: the node is offline from then on, so the backends would hold memory and ports for nobody."""
    async with supervisor:
        adopted = await supervisor.adopt()
        if adopted:
            log.info("processes adopted", count=len(adopted))
        try:
            yield
        except CannotGoOn:
            if not standing.handing_over:  # the next start adopts them
                await stop_backends(supervisor, asyncio.Event(), leave_timeout_s)
            raise


def make_folders(settings: WorkerSettings) -> None:
    for folder in (settings.models_dir, settings.backends_dir):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CannotGoOn(f"cannot make the folder {folder}: {error.strerror}; mend its permissions") from error


def read_join_token(settings: WorkerSettings) -> str:
    """A token file that is gone is no fault: the token was needed once, and the node may have joined long ago."""
    if settings.token or settings.token_file is None:
        return settings.token
    try:
        return settings.token_file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        log.warning("the token file cannot be read", file=str(settings.token_file), reason=str(error))
        return ""


def run(settings: WorkerSettings, given: Mapping[str, str | bool] | None = None) -> int:
    """The process: logging, signals, exit code. What a person must mend is one line on stderr. `given`: see `serve`."""
    configure_logging(role="worker", level=settings.log_level, json=settings.log_json)
    log.info("worker starts", **shown(settings))
    successors = Successors()
    try:
        succeeds = is_successor(os.environ)
        if succeeds:
            successors.bind_to_keeper()
        return uvloop.run(_serve_until_signalled(settings, successors, succeeds, given or {}))
    except CannotGoOn as error:
        print(f"corral worker: {mask_secrets(error.message)}", file=sys.stderr)
        return 1


async def _serve_until_signalled(
    settings: WorkerSettings, successors: Successors, succeeds: bool, given: Mapping[str, str | bool]
) -> int:
    """The exit code; a worker that has handed over may have become a keeper instead."""
    stopped, hurry = asyncio.Event(), asyncio.Event()
    asked = iter((stopped, hurry))  # a stop order over the bus is not the first of two signals

    def on_signal(number: int) -> None:
        successors.tell(number)  # whoever asks us to stop knows nobody else
        next(asked, hurry).set()

    loop = asyncio.get_running_loop()
    freeze_gc_after_start(loop)
    # Unpacking holds a thread for minutes; a few of them must not keep everybody else from the disk.
    loop.set_default_executor(ThreadPoolExecutor(THREADS, thread_name_prefix="worker"))
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    loop.add_signal_handler(signal.SIGUSR2, successors.start)
    async with alongside(successors.watch()):
        handed_over = await serve(settings, stopped=stopped, hurry=hurry, succeeds=succeeds, given=given)
    if handed_over:
        log.info("worker has handed over")
        return await successors.keep()
    successors.send_away()
    log.info("worker has left")
    return 0
