"""The controller's application in a test's own process: its routes are built once, each test brings its own services.

Building some four hundred routes takes a quarter of a second, more than most tests that need them.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from litestar import Litestar
from litestar.exceptions import LitestarDeprecationWarning

from corral.controller.access.gateway_trust import GatewayTrust
from corral.controller.access.keys import Access
from corral.controller.wiring.app import build_app

# By the names of their services. One that is in use is not here, so two at the same time are two.
_idle: defaultdict[frozenset[str], list[tuple[Litestar, dict[str, Any]]]] = defaultdict(list)


@contextlib.contextmanager
def shared_app(
    services: Mapping[str, Any], *, access_service: Access, trust: GatewayTrust, settle_s: float = 60.0
) -> Iterator[Litestar]:
    """As `build_app`, for the length of the block."""
    idle = _idle[frozenset(services)]
    app, given = idle.pop() if idle else _new_app(services)
    given.update(services)
    app.state.update({"access": access_service, "trust": trust, "settle_s": settle_s})
    try:
        yield app
    finally:
        given.update(dict.fromkeys(services))
        app.state.update({"access": None, "trust": None, "settle_s": 0.0})
        idle.append((app, given))


def _new_app(services: Mapping[str, Any]) -> tuple[Litestar, dict[str, Any]]:
    given: dict[str, Any] = dict.fromkeys(services)
    with warnings.catch_warnings():
        # How routes ask for services will have to be written otherwise for Litestar 3: not these tests' matter.
        warnings.simplefilter("ignore", LitestarDeprecationWarning)
        return build_app(given, access_service=None, trust=None), given  # type: ignore[arg-type]
