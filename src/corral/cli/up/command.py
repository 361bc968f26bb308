"""`corral up`, read from top to bottom: claim the folder, make what is missing, start, say hello, wait, stop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Callable, Coroutine, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

import typer

from corral.cli.folder import DataFolder, run_folder
from corral.cli.options import command_of
from corral.cli.output import DONE
from corral.cli.run import BusPlace, prepare_bus, settings_of
from corral.cli.up import machine, prepare
from corral.cli.up.bring_up import BringUp
from corral.cli.up.children import (
    STOP_ORDER,
    ChildSpec,
    Site,
    controller_settings,
    gateway_settings,
    role_child,
    worker_settings,
)
from corral.cli.up.lock import hold
from corral.cli.up.logs import Echo, RotatingFile
from corral.cli.up.ports import choose_ports, read_ports, remember_ports
from corral.cli.up.renewal import Renewal
from corral.cli.up.settings import UpSettings
from corral.cli.up.supervisor import Supervisor, Timing
from corral.client.contexts import forget_context, refuse_taken
from corral.kit.clock import SystemClock
from corral.kit.socket_activation import take_listeners

_BUS_STEADY_AFTER_S = 2.0  # nats-server that cannot start ends at once, and it does not say when it is ready

HELP = """Run a whole fleet on this machine: bus, controller, gateway and a worker.

Nothing else need be installed and nothing is open: it serves this machine alone until told otherwise.

\b
Examples:
  corral up
  corral up --port 18080 --data ~/corral-test
  corral up --lan                     other machines may join; TLS from a CA made here
  corral up --port 18080 --data ~/corral-test --context test
                                      a second fleet; reach it with `--context test`
  corral up --gateway-processes 4     a gateway that uses four cores
  corral up --no-worker               only the control plane and the gateway
"""


def up(settings: UpSettings) -> int:
    folder = DataFolder(settings.data)
    if settings.context:
        refuse_taken(os.environ, settings.context, str(folder.root))
    with contextlib.ExitStack() as held:
        with prepare.explained(folder.root):
            prepare.make_folders(folder)
            prepare.check_room(folder)
            held.enter_context(hold(folder.lock))
            inherited = tuple(take_listeners(os.environ))  # systemd's, where it has a socket unit for us
            site = settle(settings, folder, inherited)
            listeners = inherited or machine.listen_on(site.bind, site.port, "--port")
            for listener in listeners:
                held.enter_context(listener)
            specs = make_ready(settings, site, listeners)
        return asyncio.run(serve(settings, site, specs))


def settle(settings: UpSettings, folder: DataFolder, inherited: Sequence[socket.socket] = ()) -> Site:
    """Every address and port, or the one line that says which cannot be had."""
    bind = settings.bind
    listening = inherited[0].getsockname()[1] if inherited else 0
    ports = choose_ports(settings, bind, remembered=read_ports(folder), listening=listening)
    remember_ports(folder, ports)
    everywhere = bind in ("0.0.0.0", "::")
    return Site(
        folder=folder,
        run=run_folder(folder.root, os.environ),
        bind=bind,
        port=ports["--port"],
        bus_port=ports["--bus-port"],
        ingress_port=ports.get("--ingress-port", 0),
        blob_port=ports["--blob-port"],
        blob_port_moves=not settings.blob_port,
        blob_folder=_chosen_blobs(),
        lan=settings.reaches_out,
        tls=settings.tls,
        address=machine.main_address() if everywhere else bind,
        node_name=settings.name,
    )


def _chosen_blobs() -> Path | None:
    """A person may keep model files on another disk; controller and worker must mean the same folder by it."""
    chosen = os.environ.get("CORRAL_BLOBS", "")
    return Path(chosen).expanduser().absolute() if chosen else None


def make_ready(settings: UpSettings, site: Site, listeners: tuple[socket.socket, ...] = ()) -> dict[str, ChildSpec]:
    """Secrets, certificates, configuration; and what to start. `listeners`: of the public port."""
    folder = site.folder
    prepare.make_run_folder(site.run)
    prepare.make_key(folder.admin_key)
    prepare.make_key(folder.gateway_key)
    if site.tls:
        prepare.make_certificates(folder, certificate_names(site)(), datetime.now(UTC))
    bus = prepare_bus(
        BusPlace(
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
    """What this machine is called now; asked again when the certificate is looked at."""

    def names() -> tuple[str, ...]:
        found = (*machine.host_names(), *machine.addresses())
        return found if site.bind in (*found, "0.0.0.0", "::") else (*found, site.bind)

    return names


def _without_settings() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if not key.startswith(("CORRAL_", "LOCALAI_"))}


async def serve(settings: UpSettings, site: Site, specs: dict[str, ChildSpec]) -> int:
    """Until a signal says stop, or the start fails."""
    told = RotatingFile(site.folder.logs / "up.log", max_bytes=settings.log_file_bytes)
    echo = Echo()

    def tell(line: str) -> None:
        told.write(f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ} {line}\n".encode())
        echo.line(f"corral: {line}")

    supervisor = Supervisor(
        site.folder.logs,
        clock=SystemClock(),
        tell=tell,
        echo=echo.line if settings.verbose else None,
        timing=Timing(settings.restart_first_s, settings.restart_cap_s, settings.steady_after_s),
        stop_order=STOP_ORDER,
        log_file_bytes=settings.log_file_bytes,
    )
    stopping = asyncio.Event()

    def on_signal() -> None:
        if stopping.is_set():
            tell("stopping at once")
            supervisor.hurry()
        else:
            tell("stopping; again to stop at once")
            stopping.set()

    try:
        with _signals(on_signal):
            async with supervisor:
                renewal = Renewal(site.folder, certificate_names(site), supervisor, SystemClock(), tell)
                await _until(
                    stopping,
                    BringUp(settings, site, specs, supervisor, tell),
                    renewal.run(settings.certificate_check_s) if site.tls else None,
                )
        return DONE
    finally:
        with contextlib.suppress(OSError):
            forget_context(os.environ, data=str(site.folder.root))
        site.folder.worker_token.unlink(missing_ok=True)
        _remove_sockets(site.run)
        echo.close()
        told.close()


async def _until(stopping: asyncio.Event, bring_up: BringUp, beside: Coroutine[None, None, None] | None) -> None:
    """The start may fail, which ends everything; once it is over only a signal does."""
    start = asyncio.create_task(bring_up.run(), name="start")
    stop = asyncio.create_task(stopping.wait(), name="stop")
    tasks = [start, stop] + ([asyncio.create_task(beside, name="certificates")] if beside else [])
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
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # under nohup the terminal's end is none of our business
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


app = typer.Typer(rich_markup_mode=None, add_completion=False)
app.command("up")(command_of(UpSettings, up, help=HELP))
