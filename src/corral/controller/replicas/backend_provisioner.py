"""Has backends installed on the nodes where replicas were placed: by a rule for that node, of origin `load`. So the
install is retried, shown and withdrawn like one that a user requested."""

from __future__ import annotations

from functools import partial

from corral.controller.operations.accept import OperationAcceptor
from corral.controller.operations.requests import OperationKind, parse_request
from corral.controller.replicas.retry import RetryState
from corral.kit.clock import Clock
from corral.kit.errors import CorralError
from corral.kit.log import get_log
from corral.kit.tasks import KeyedTasks
from corral.store.records import BackendRequest, RuleOrigin, Scope, ScopeKind

log = get_log(__name__)


class BackendProvisioner(KeyedTasks[tuple[str, str]]):
    """`async with` it."""

    def __init__(self, acceptor: OperationAcceptor, clock: Clock, *, rule_shows_s: float = 10.0) -> None:
        """`rule_shows_s`: if no rule requires the backend by then, a user withdrew it."""
        super().__init__()
        self._acceptor = acceptor
        self._clock = clock
        self._rule_shows_s = rule_shows_s
        self._requested: dict[tuple[str, str], float] = {}
        self._retries = RetryState[tuple[str, str]](clock)
        self.refused: dict[tuple[str, str], str] = {}  # by node and backend: why the install was refused

    def ensure(self, lacking: set[tuple[str, str]]) -> None:
        """Request installs for these nodes and backends, which no rule requires yet."""
        self.refused = {key: why for key, why in self.refused.items() if key in lacking}
        self._requested = {key: at for key, at in self._requested.items() if key in lacking}
        self._retries.forget_all_but(lacking)
        for key in sorted(lacking):
            if key in self._requested:
                if self._clock.monotonic() - self._requested[key] > self._rule_shows_s:
                    self.refused[key] = "its install was withdrawn"
                continue
            if key not in self.refused and self._retries.can_try(key):
                self.start(key, partial(self._request, *key), name=f"install {key[1]}")

    async def _request(self, node_id: str, backend: str) -> None:
        try:
            request = parse_request(
                OperationKind.INSTALL,
                BackendRequest(backend),
                scope=Scope(ScopeKind.NODE, node_id),
                origin=RuleOrigin.LOAD,
            )
            accepted = await self._acceptor.accept(request)
            self._requested[(node_id, backend)] = self._clock.monotonic()
            log.info("backend requested", backend=backend, node_id=node_id, operation=accepted.operation_id)
        except CorralError as error:
            if not self._retries.should_retry((node_id, backend), error):
                self.refused[(node_id, backend)] = error.message
            log.warning("backend cannot be requested", backend=backend, node_id=node_id, error=error.message)
        except Exception:
            self.refused[(node_id, backend)] = "an internal error; see the controller's log"
            log.exception("backend cannot be requested", backend=backend, node_id=node_id)
