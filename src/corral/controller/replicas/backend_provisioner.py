"""Has a backend installed where a replica was placed: by a rule for that node, of origin `load`, as people would do it.
So it is tried again, shown, and taken back like any other install."""

from __future__ import annotations

from functools import partial

from corral.controller.operations.accept import OperationAcceptor
from corral.controller.operations.requests import OperationKind, parse_request
from corral.controller.replicas.retry import Trying
from corral.kit.clock import Clock
from corral.kit.errors import CorralError
from corral.kit.log import get_log
from corral.kit.tasks import KeyedTasks
from corral.store.records import BackendRequest, Origin, Scope, ScopeKind

log = get_log(__name__)


class Bringing(KeyedTasks[tuple[str, str]]):
    """`async with` it."""

    def __init__(self, acceptor: OperationAcceptor, clock: Clock, *, rule_shows_s: float = 10.0) -> None:
        """`rule_shows_s`: if by then no rule asks for what was asked for, somebody took it back."""
        super().__init__()
        self._acceptor = acceptor
        self._clock = clock
        self._rule_shows_s = rule_shows_s
        self._asked: dict[tuple[str, str], float] = {}
        self._trying = Trying[tuple[str, str]](clock)
        self.refused: dict[tuple[str, str], str] = {}  # by node and backend: why nobody could even ask for it

    def want(self, lacking: set[tuple[str, str]]) -> None:
        """No rule says yet that these nodes should have these backends."""
        self.refused = {key: why for key, why in self.refused.items() if key in lacking}
        self._asked = {key: at for key, at in self._asked.items() if key in lacking}
        self._trying.forget_all_but(lacking)
        for key in sorted(lacking):
            if key in self._asked:
                if self._clock.monotonic() - self._asked[key] > self._rule_shows_s:
                    self.refused[key] = "its install was taken back"
                continue
            if key not in self.refused and self._trying.may(key):
                self.start(key, partial(self._ask, *key), name=f"bring {key[1]}")

    async def _ask(self, node_id: str, backend: str) -> None:
        try:
            request = parse_request(
                OperationKind.INSTALL, BackendRequest(backend), scope=Scope(ScopeKind.NODE, node_id), origin=Origin.LOAD
            )
            accepted = await self._acceptor.accept(request)
            self._asked[(node_id, backend)] = self._clock.monotonic()
            log.info("backend asked for", backend=backend, node_id=node_id, operation=accepted.operation_id)
        except CorralError as error:
            if not self._trying.again((node_id, backend), error):
                self.refused[(node_id, backend)] = error.message
            log.warning("backend cannot be asked for", backend=backend, node_id=node_id, error=error.message)
        except Exception:
            self.refused[(node_id, backend)] = "something went wrong; the controller's log says what"
            log.exception("backend cannot be asked for", backend=backend, node_id=node_id)
