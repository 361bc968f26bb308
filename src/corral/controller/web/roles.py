"""Which role each route needs, read from the guards it really has: the reference cannot say something else."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from litestar.routes import BaseRoute, HTTPRoute

from corral.controller.api import auth

# Least to most demanding: a route inside a guarded group may ask for more than the group does.
_WORDS: Mapping[Callable[..., Any], str] = {
    auth.anybody_known: "any key",
    auth.viewers: "viewer or admin",
    auth.admins: "admin",
    auth.gateways: "gateway",
}
_RANK = list(_WORDS.values())


def roles_needed(routes: Iterable[BaseRoute]) -> dict[tuple[str, str], str]:
    """By (method, path as OpenAPI writes it)."""
    needed = {}
    for route in routes:
        if isinstance(route, HTTPRoute):
            for handler in route.route_handlers:
                for method in handler.http_methods:
                    needed[str(method), route.path_format] = _words(route.path_format, handler.resolve_guards())
    return needed


def _words(path: str, guards: Iterable[object]) -> str:
    if path.startswith("/api/node/"):  # checked by the registry itself, against the node's row
        return "a join token" if path.endswith("/register") else "the node's own token"
    found = [words for guard, words in _WORDS.items() if any(getattr(g, "fn", g) is guard for g in guards)]
    return max(found, key=_RANK.index, default="nobody: open")
