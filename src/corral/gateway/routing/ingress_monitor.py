"""Notices that the ingress of a worker has stopped responding while requests wait for the first byte of their answers.

The time an answer takes proves nothing: a replica may read a long prompt for minutes. So the monitor asks the ingress
itself, with `HEAD /healthz` on a connection of its own, as long as a request waits. An ingress that answers no probe
for `silent_s` is silent: its node gets no requests until a probe succeeds, and every request that has received no byte
of its answer fails with `UpstreamFailed.unresponsive` (`http/forward.py` then picks another replica). The same happens
on a single connection whose bytes the worker's kernel does not acknowledge for as long.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ssl
from collections.abc import Callable, Collection

from corral.contract.http import Target
from corral.gateway.routing.in_flight import Ejection
from corral.kit.clock import Clock
from corral.kit.log import get_log
from corral.kit.sockets import abort
from corral.relay import UpstreamPool

log = get_log(__name__)

_CHECKS = 6  # checks for waiting requests within `silent_s`
_PROBES = 3  # probes within `silent_s` while an ingress answers them
# One probe is waited for in so many steps. A step counts once however long it took: while this process stands still,
# it cannot receive an answer, and that time must not be held against the ingress.
_STEPS = 12
_OUR_OWN_FAULTS = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL))
_HEAD_LIMIT_BYTES = 16 * 1024


class IngressMonitor:
    def __init__(
        self,
        pool: UpstreamPool,
        ejection: Ejection,
        nodes_at: Callable[[Target], Collection[str]],
        clock: Clock,
        *,
        silent_s: float,
    ) -> None:
        """`nodes_at` gives the nodes whose ingress a target is; none: the target is not an ingress."""
        self._pool = pool
        self._ejection = ejection
        self._nodes_at = nodes_at
        self._clock = clock
        self._silent_s = silent_s
        self._waiting: set[Target] = set()
        self._silent: dict[Target, tuple[str, ...]] = {}  # and the nodes that get no requests for it
        self._watches: dict[Target, asyncio.Task[None]] = {}

    async def run(self) -> None:
        check_s = self._silent_s / _CHECKS
        async with asyncio.TaskGroup() as tasks:
            while True:
                await self._clock.sleep(check_s)
                self._pool.give_up_unacknowledged(self._is_ingress, self._silent_s, "it acknowledges nothing")
                before = self._clock.monotonic() - check_s
                self._waiting = {target for target, since in self._pool.waiting_since().items() if since <= before}
                for target in self._waiting:
                    if target not in self._watches and self._is_ingress(target):
                        self._watches[target] = tasks.create_task(self._watch(target), name="ingress probe")

    def _is_ingress(self, target: Target) -> bool:
        return bool(self._nodes_at(target))

    async def _watch(self, target: Target) -> None:
        """Until no request waits there, or, of a silent ingress, until it responds or is gone from the fleet."""
        probe = HealthProbe(target, self._pool.tls_for(target) if target.tls else None, self._silent_s)
        try:
            while self._is_ingress(target) and (target in self._silent or target in self._waiting):
                if await probe.responds():
                    if target in self._silent:
                        log.info("an ingress responds again", nodes=self._silent[target])
                        self._release(target)
                    await self._clock.sleep(self._silent_s / _PROBES)
                else:
                    self._on_silent(target)
        except Exception:
            log.exception("probing an ingress failed", host=target.host, port=target.port)
        finally:
            probe.close()
            self._release(target)
            del self._watches[target]

    def _on_silent(self, target: Target) -> None:
        nodes = tuple(self._nodes_at(target))
        if target not in self._silent:
            log.warning("an ingress stopped responding", nodes=nodes, host=target.host, port=target.port)
        for node_id in nodes:  # first, so that no request is sent there again
            self._ejection.suspend_node(node_id)
        self._silent[target] = nodes
        self._pool.give_up(target, f"its ingress answered no health probe for {self._silent_s:g} s")

    def _release(self, target: Target) -> None:
        for node_id in self._silent.pop(target, ()):
            self._ejection.resume_node(node_id)


class HealthProbe:
    """Asks one ingress for a sign of life, on a connection that is kept between probes."""

    def __init__(self, target: Target, tls: ssl.SSLContext | None, silent_s: float) -> None:
        self._target = target
        self._tls = tls
        self._silent_s = silent_s
        self._kept: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._request = b"HEAD /healthz HTTP/1.1\r\nhost: %b\r\n\r\n" % target.host.encode("idna")

    async def responds(self) -> bool:
        """Whether the ingress sent any answer within `silent_s`."""
        asking = asyncio.create_task(self._ask_until_answered(), name="ingress health")
        try:
            for _ in range(_STEPS):
                await asyncio.wait((asking,), timeout=self._silent_s / _STEPS)
                if asking.done():
                    asking.result()
                    return True
            return False
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    def close(self) -> None:
        if self._kept is not None:
            abort(self._kept[1].transport)
            self._kept = None

    async def _ask_until_answered(self) -> None:
        while True:
            try:
                if self._kept is None:
                    await self._ask()
                else:  # only this connection may be broken, so a new one gets most of the time
                    async with asyncio.timeout(self._silent_s / _PROBES):
                        await self._ask()
                return
            except ssl.SSLError:
                return  # whatever is wrong with its certificate, it responds
            except (OSError, EOFError, asyncio.LimitOverrunError) as error:  # TimeoutError is an OSError
                if getattr(error, "errno", None) in _OUR_OWN_FAULTS:
                    return
                self.close()
            await asyncio.sleep(self._silent_s / _STEPS)

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """In the same order as the pool: the unix socket, then host and port."""
        target = self._target
        if target.unix_path:
            with contextlib.suppress(OSError):
                return await asyncio.open_unix_connection(target.unix_path, limit=_HEAD_LIMIT_BYTES)
        return await asyncio.open_connection(
            target.host,
            target.port,
            ssl=self._tls,
            server_hostname=(target.server_name or target.host) if self._tls else None,
            limit=_HEAD_LIMIT_BYTES,
        )

    async def _ask(self) -> None:
        if self._kept is None:
            self._kept = await self._connect()
        reader, writer = self._kept
        answered = False
        try:
            writer.write(self._request)
            await reader.readuntil(b"\r\n\r\n")
            answered = True
        finally:
            if not answered:  # a late answer must not be taken for that of the next probe
                self.close()
