"""Adds the unix socket of a worker on this machine to the target of its ingress.

Whether a worker listens there shows at each new connection: the pool tries the socket first, then host and port
(`relay/pool.py`). So nothing has to be watched here, and a file that a dead worker left does no harm.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

from corral.contract.http import Target
from corral.contract.local_sockets import local_socket
from corral.kit.errors import Invalid
from corral.kit.hosts import is_loopback

_MAX_HOSTS = 4096
_REMEMBER_S = 60.0  # addresses of this machine change, if rarely


class LocalSockets:
    def __init__(self, folder: Path, monotonic: Callable[[], float]) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)  # before another user does
        except OSError as error:
            raise Invalid(f"--local-sockets: cannot create the folder {folder}: {error.strerror}") from error
        self._folder = folder
        self._monotonic = monotonic
        self._hosts: dict[str, bool] = {}
        self._since = 0.0

    def add_to(self, target: Target, node_id: str) -> Target:
        """With the socket, where the node's address is one of this machine. A node with another address may have the id
        of a worker that ran here (`corral nodes replace`)."""
        if not self._is_here(target.host):
            return target
        return target._replace(unix_path=local_socket(self._folder, node_id, target.port))

    def _is_here(self, host: str) -> bool:
        now = self._monotonic()
        if now - self._since > _REMEMBER_S or len(self._hosts) >= _MAX_HOSTS:
            self._hosts.clear()
            self._since = now
        found = self._hosts.get(host)
        if found is None:
            found = self._hosts[host] = is_this_machine(host)
        return found


def is_this_machine(host: str) -> bool:
    """Only for addresses and localhost: to resolve a name could take long."""
    if is_loopback(host):
        return True
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            socket.inet_pton(probe.family, host)  # refuses names
            probe.bind((host, 0))  # the kernel refuses addresses of other machines
    except (OSError, ValueError):
        return False
    return True
