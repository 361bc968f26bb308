"""`corral up` from start to end: lock the data folder, prepare it, start the processes, wait for a signal, stop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Callable, Coroutine, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

from corral.cli.common import declare
from corral.cli.common.data_folder import DataFolder, lock_file, refuse_unfinished_restore, run_folder
from corral.cli.common.output import DONE
from corral.cli.common.roles import BusServerSettings, find_version_folder, prepare_bus, settings_of
from corral.cli.common.settings_command import settings_command
from corral.cli.up import machine, prepare
from corral.cli.up.certificate_renewal import CertificateRenewal
from corral.cli.up.children import (
    STOP_ORDER,
    ChildSpec,
    Site,
    controller_settings,
    gateway_settings,
    role_child,
    worker_settings,
)
from corral.cli.up.logs import RotatingFile, TerminalWriter
from corral.cli.up.ports import choose_ports, read_ports, save_ports
from corral.cli.up.role_versions import RoleVersions, check_roles, describe_open
from corral.cli.up.settings import UpSettings
from corral.cli.up.startup import FleetStartup
from corral.cli.up.supervisor import Supervisor, Timing
from corral.client.contexts import forget_context, refuse_taken
from corral.kit.clock import SystemClock
from corral.kit.sockets import take_listeners

_BUS_STEADY_AFTER_S = 2.0  # nats-server does not report readiness; one that cannot start exits at once

HELP = """Run a fleet on this machine. Ctrl-C stops it.

A fleet is a bus, a controller, a gateway and a worker.

Without --lan or --host the fleet listens on the loopback interface and serves only this machine.

\b
Examples:
  corral up
  corral up --port 18080 --data ~/corral-test
  corral up --lan                     other machines can join; TLS with a new CA
  corral up --lan --tls-cert fleet.crt --tls-key fleet.key
                                      with a certificate of your own for its host names
  corral up --port 18080 --data ~/corral-test --context test
                                      a second fleet; commands use it with `--context test`
  corral up --gateway-processes 4     a gateway with four processes
  corral up --no-worker               no worker on this machine
"""


def up(settings: UpSettings) -> int:
    folder = DataFolder(settings.data)
    if settings.context:
        refuse_taken(os.environ, settings.context, str(folder.root))
    with contextlib.ExitStack() as held:
        with prepare.explain_os_errors(folder.root):
            prepare.make_folders(folder)
            prepare.check_free_space(folder)
            held.enter_context(lock_file(folder.lock))
            refuse_unfinished_restore(folder)
            inherited = tuple(take_listeners(os.environ))  # from a systemd socket unit
            site = resolve_site(settings, folder, inherited)
            listeners = inherited or machine.listen_on(site.bind, site.port, "--port")
            for listener in listeners:
                held.enter_context(listener)
            specs = prepare_children(settings, site, listeners)
        return asyncio.run(serve(settings, site, specs))


def resolve_site(settings: UpSettings, folder: DataFolder, inherited: Sequence[socket.socket] = ()) -> Site:
    """Choose every address and port. `Failed` names the one that is not available."""
    bind = settings.bind
    inherited_port = inherited[0].getsockname()[1] if inherited else 0
    ports = choose_ports(settings, bind, remembered=read_ports(folder), inherited_port=inherited_port)
    save_ports(folder, ports)
    everywhere = bind in ("0.0.0.0", "::")
    names = prepare.read_own_certificate(settings.tls_cert, settings.tls_key)
    return Site(
        folder=folder,
        run=run_folder(folder.root, os.environ),
        bind=bind,
        port=ports["--port"],
        bus_port=ports["--bus-port"],
        ingress_port=ports.get("--ingress-port", 0),
        blob_port=ports["--blob-port"],
        blob_port_moves=not settings.blob_port,
        blob_folder=_blob_folder(),
        lan=settings.is_public,
        tls=settings.tls,
        address=machine.main_address() if everywhere else bind,
        host_name=machine.public_name(names),
        tls_cert=settings.tls_cert,
        tls_key=settings.tls_key,
        tls_names=names,
        node_name=settings.name,
        ingress_socket=settings.ingress_socket,
    )


def _blob_folder() -> Path | None:
    """The folder of model files that the user chose; controller and worker must use the same one."""
    chosen = os.environ.get("CORRAL_BLOBS", "")
    return Path(chosen).expanduser().absolute() if chosen else None


def prepare_children(
    settings: UpSettings, site: Site, listeners: tuple[socket.socket, ...] = ()
) -> dict[str, ChildSpec]:
    """Create secrets, certificates and configuration; return the processes. `listeners`: of the public port."""
    folder = site.folder
    prepare.make_run_folder(site.run)
    prepare.make_key(folder.admin_key)
    prepare.make_key(folder.gateway_key)
    if site.tls:
        prepare.make_certificates(folder, certificate_names(site)(), datetime.now(UTC))
    bus = prepare_bus(
        BusServerSettings(
            folder=folder.bus,
            keys=folder.bus_keys,
            host=site.bind,
            port=site.bus_port,
            certificate=folder.server_cert if site.tls else None,
            key=folder.server_key if site.tls else None,
        )
    )
    stop_s = settings.stop_timeout_s
    specs = {"bus": ChildSpec("bus", bus, _without_settings(), stop_s, steady_after_s=_BUS_STEADY_AFTER_S)}
    for name, decided in (
        ("controller", controller_settings(site)),
        ("gateway", gateway_settings(site, settings.gateway_processes)),
        ("worker", worker_settings(site)),
    ):
        if name != "worker" or settings.worker:
            specs[name] = role_child(
                name,
                settings_of(name),
                decided,
                os.environ,
                stop_timeout_s=stop_s,
                listeners=listeners if name == "gateway" else (),
            )
    return specs


def certificate_names(site: Site) -> Callable[[], tuple[str, ...]]:
    """A function that returns the current names of this machine; it is called again at each certificate check."""

    def names() -> tuple[str, ...]:
        # Workers reach bus and model files under the name of the gateway.
        found = (*machine.host_names(), *machine.addresses(), *site.tls_names)
        return found if site.bind in (*found, "0.0.0.0", "::") else (*found, site.bind)

    return names


def _without_settings() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if not key.startswith(("CORRAL_", "LOCALAI_"))}


async def serve(settings: UpSettings, site: Site, specs: dict[str, ChildSpec]) -> int:
    """Run until a signal arrives or the start fails."""
    log = RotatingFile(site.folder.logs / "up.log", max_bytes=settings.log_file_bytes)
    terminal = TerminalWriter()

    def report(line: str) -> None:
        log.write(f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ} {line}\n".encode())
        terminal.line(f"corral: {line}")

    supervisor = Supervisor(
        site.folder.logs,
        clock=SystemClock(),
        report=report,
        echo=terminal.line if settings.verbose else None,
        timing=Timing(settings.restart_first_s, settings.restart_cap_s, settings.steady_after_s),
        stop_order=STOP_ORDER,
        log_file_bytes=settings.log_file_bytes,
    )
    stopping = asyncio.Event()

    def on_signal() -> None:
        if stopping.is_set():
            report("stopping at once")
            supervisor.kill()
        else:
            report("stopping the fleet; press Ctrl-C again to stop at once")
            stopping.set()

    try:
        if site.tls_cert is not None and (warning := prepare.renewal_warning(site.tls_cert)):
            report(warning)
        with _signals(on_signal):
            async with supervisor:
                renewal = CertificateRenewal(site.folder, certificate_names(site), supervisor, SystemClock(), report)
                startup = FleetStartup(settings, site, specs, supervisor, report)
                follow = follow_versions(supervisor, startup, report)
                await _run_until_stopped(
                    stopping,
                    startup,
                    *([renewal.run(settings.certificate_check_s)] if site.tls else []),
                    *([follow.run()] if follow is not None else []),
                )
        return DONE
    finally:
        with contextlib.suppress(OSError):
            forget_context(os.environ, data=str(site.folder.root))
        site.folder.worker_token.unlink(missing_ok=True)
        _remove_sockets(site.run)
        terminal.close()
        log.close()


def follow_versions(
    supervisor: Supervisor, startup: FleetStartup, report: Callable[[str], None]
) -> RoleVersions | None:
    """None where this program cannot be replaced: it was not installed in a folder of versions."""
    folder = find_version_folder()
    if folder is None:
        return None

    async def why_wait() -> str:
        if await asyncio.to_thread(folder.is_upgrading):
            return "the worker of this machine tries it"
        return describe_open(await startup.list_open_operations())

    return RoleVersions(supervisor, folder.program, folder.find_current, why_wait, check_roles, SystemClock(), report)


async def _run_until_stopped(
    stopping: asyncio.Event, startup: FleetStartup, *more: Coroutine[None, None, None]
) -> None:
    """Run the startup and wait for the stop signal. A failed startup ends the wait."""
    start = asyncio.create_task(startup.run(), name="start")
    stop = asyncio.create_task(stopping.wait(), name="stop")
    tasks = [start, stop, *(asyncio.create_task(each) for each in more)]
    try:
        await asyncio.wait((start, stop), return_when=asyncio.FIRST_COMPLETED)
        if start.done():
            start.result()
            await stop
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.contextmanager
def _signals(handler: Callable[[], None]) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup ignores SIGHUP
        numbers.append(signal.SIGHUP)
    for number in numbers:
        loop.add_signal_handler(number, handler)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def _remove_sockets(run: Path) -> None:
    with contextlib.suppress(OSError):
        for each in run.iterdir():
            each.unlink()
        run.rmdir()


app = declare.App()
app.command("up")(settings_command(UpSettings, up, help=HELP))
