"""What this machine is called and which of its ports are free."""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Iterable

import psutil

from corral.cli.port_owners import find_owner
from corral.kit.errors import Failed
from corral.kit.socket_activation import open_listeners


def addresses() -> tuple[str, ...]:
    """Every address somebody might use to reach this machine; link-local ones need a zone and are left out."""
    found = {"127.0.0.1", "::1"}
    for interface in psutil.net_if_addrs().values():
        for each in interface:
            if each.family in (socket.AF_INET, socket.AF_INET6) and not _is_link_local(each.address):
                found.add(str(ipaddress.ip_address(each.address)))
    return tuple(sorted(found))


def _is_link_local(text: str) -> bool:
    try:
        return ipaddress.ip_address(text).is_link_local
    except ValueError:
        return True


def host_names() -> tuple[str, ...]:
    name = socket.gethostname().strip().rstrip(".").lower()
    names = {"localhost"}
    if _is_host_name(name):
        short = name.partition(".")[0]
        names |= {name, short, f"{short}.local"}  # .local: how machines at home call each other
    return tuple(sorted(names))


def _is_host_name(name: str) -> bool:
    allowed = set("abcdefghijklmnopqrstuvwxyz0123456789-.")
    return bool(name) and len(name) < 200 and not set(name) - allowed and ".." not in name


def main_address() -> str:
    """The address other machines most likely use: the source address of a packet to the outside. None is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # reserved for documentation: nobody is there
            return str(probe.getsockname()[0])
        except OSError:  # no route at all
            outside = [each for each in addresses() if not ipaddress.ip_address(each).is_loopback]
            return outside[0] if outside else "127.0.0.1"


def loopback_of(host: str) -> str:
    """How this machine reaches itself where `host` is bound."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)


def in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def free_port(host: str, taken: Iterable[int] = ()) -> int:
    """A port nobody listens on now. Somebody may take it before we do: then the child says so."""
    while True:
        with _listening(host, 0) as probe:
            port = int(probe.getsockname()[1])
        if port not in taken:
            return port


def check_port(host: str, port: int, flag: str) -> None:
    """`Failed` with a line that names the port, who has it if we may know, and the flag that chooses another."""
    try:
        _listening(host, port).close()
    except OSError as error:
        raise Failed(_why_not(error, host, port, flag)) from error


def listen_on(host: str, port: int, flag: str) -> tuple[socket.socket, ...]:
    """The sockets of a port that `choose_ports` found. `Failed` when somebody has been quicker."""
    try:
        return tuple(open_listeners(host, port))
    except OSError as error:
        raise Failed(_why_not(error, host, port, flag)) from error


def _listening(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    probe = socket.socket(family, socket.SOCK_STREAM)
    try:
        # As our servers do it: a port whose last connections are only fading away is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))
        probe.listen(1)
    except BaseException:
        probe.close()
        raise
    return probe


def _why_not(error: OSError, host: str, port: int, flag: str) -> str:
    if error.errno == errno.EADDRINUSE:
        owner = find_owner(port, flag)
        by = f" by {owner.words}" if owner is not None else ""
        return f"port {port} is in use{by}: choose another with {flag}, or stop what uses it"
    if error.errno == errno.EACCES:
        return f"port {port} may not be used by this user: choose one above 1023 with {flag}"
    if error.errno == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror):
        return f"{host!r} is not an address of this machine: choose another with --host"
    return f"cannot listen on {host}:{port}: {error.strerror or error}"
