"""The names and addresses of this machine, and which of its ports are free."""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Iterable

import psutil

from corral.cli.common.port_owners import find_owner
from corral.kit.certificates import covers
from corral.kit.errors import Failed
from corral.kit.sockets import open_listeners


def addresses() -> tuple[str, ...]:
    """Every address of this machine except link-local ones, which need a zone."""
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
        names |= {name, short, f"{short}.local"}  # .local: multicast DNS in home networks
    return tuple(sorted(names))


def public_name(names: Iterable[str]) -> str:
    """The host name of a certificate under which others reach this machine; empty: they use its address. Pure but for
    the host name of this machine, which decides what a `*` stands for."""
    listed = tuple(names)
    own = [name for name in host_names() if name != "localhost" and covers(listed, name)]
    return next(iter([*own, *(name for name in listed if "*" not in name)]), "")


def _is_host_name(name: str) -> bool:
    allowed = set("abcdefghijklmnopqrstuvwxyz0123456789-.")
    return bool(name) and len(name) < 200 and not set(name) - allowed and ".." not in name


def main_address() -> str:
    """The address other machines most likely use: the source address of a packet to the outside. None is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # reserved for documentation: no host answers
            return str(probe.getsockname()[0])
        except OSError:  # no route at all
            outside = [each for each in addresses() if not ipaddress.ip_address(each).is_loopback]
            return outside[0] if outside else "127.0.0.1"


def loopback_of(host: str) -> str:
    """The address under which this machine reaches a server bound to `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)


def url_host(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def free_port(host: str, taken: Iterable[int] = ()) -> int:
    """A port that is free now. If another program takes it before the child does, the child reports that."""
    while True:
        with _listen(host, 0) as probe:
            port = int(probe.getsockname()[1])
        if port not in taken:
            return port


def check_port(host: str, port: int, flag: str) -> None:
    """Raise `Failed` if the port cannot be used; the message names the port, its owner and the flag for another one."""
    try:
        _listen(host, port).close()
    except OSError as error:
        raise Failed(_refusal(error, host, port, flag)) from error


def listen_on(host: str, port: int, flag: str) -> tuple[socket.socket, ...]:
    """Open the listening sockets of a port that `choose_ports` chose. `Failed` if it was taken meanwhile."""
    try:
        return tuple(open_listeners(host, port))
    except OSError as error:
        raise Failed(_refusal(error, host, port, flag)) from error


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    probe = socket.socket(family, socket.SOCK_STREAM)
    try:
        # As the servers do: a port with connections in TIME_WAIT is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))
        probe.listen(1)
    except BaseException:
        probe.close()
        raise
    return probe


def _refusal(error: OSError, host: str, port: int, flag: str) -> str:
    if error.errno == errno.EADDRINUSE:
        owner = find_owner(port, flag)
        by = f" by {owner.words}" if owner is not None else ""
        return f"port {port} is in use{by}: choose another port with {flag}, or stop that program"
    if error.errno == errno.EACCES:
        return f"this user may not listen on port {port}: choose a port above 1023 with {flag}"
    if error.errno == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror):
        return f"{host!r} is not an address of this machine: choose another with --host"
    return f"cannot listen on {host}:{port}: {error.strerror or error}"
