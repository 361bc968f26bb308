"""The pages that the navigation leads to, in its order, and where a sign-in may lead. Pure.

A page enters the navigation with its line here: only pages that exist are shown.
"""

from __future__ import annotations

from dataclasses import dataclass

from corral.controller.access.principal import Role

FLEET_ROLES = frozenset((Role.ADMIN, Role.VIEWER))
ADMIN_ROLES = frozenset((Role.ADMIN,))
MODEL_ROLES = frozenset((Role.ADMIN, Role.INFERENCE))  # that may use models


@dataclass(frozen=True)
class Place:
    path: str
    words: str
    icon: str  # a symbol of `templates/_icons.html`
    roles: frozenset[Role] = FLEET_ROLES  # that see it


OVERVIEW = "/"
NODES = "/nodes"
MODELS = "/fleet/models"
BACKENDS = "/fleet/backends"
OPERATIONS = "/fleet/operations"
REQUESTS = "/fleet/requests"
PLAYGROUND = "/playground"
USAGE = "/usage"
LOGS = "/fleet/logs"
KEYS = "/fleet/keys"
SETTINGS = "/fleet/settings"
CATALOGUE = "/fleet/backends/catalogue"
DOCS = "/docs"
PLACES = (
    Place(OVERVIEW, "Overview", "overview"),
    Place(NODES, "Nodes", "nodes"),
    Place(MODELS, "Models", "models"),
    Place(PLAYGROUND, "Playground", "playground", MODEL_ROLES),
    Place(USAGE, "Your usage", "requests", frozenset((Role.INFERENCE,))),
    Place(BACKENDS, "Backends", "backends"),
    Place(REQUESTS, "Requests", "requests"),
    Place(OPERATIONS, "Operations", "operations"),
    Place(LOGS, "Logs", "logs"),
    Place(KEYS, "Keys", "keys", ADMIN_ROLES),
    Place(SETTINGS, "Settings", "settings", ADMIN_ROLES),
    Place(DOCS, "API docs", "docs"),
)
START = {Role.ADMIN: OVERVIEW, Role.VIEWER: OVERVIEW, Role.INFERENCE: PLAYGROUND}  # after a sign-in
_DETAILS = ("/nodes/", "/models/", "/fleet/requests/", "/fleet/backends/")  # pages about one thing, by its name


SHORT = ("/models", "/requests", "/operations", "/logs", "/keys", "/settings")  # typed by hand


def places_for(role: Role) -> tuple[Place, ...]:
    return tuple(place for place in PLACES if role in place.roles)


def is_place(wanted: str) -> bool:
    """Whether a sign-in may lead there: to our own pages only, or a link could send people to another site."""
    path = wanted.partition("?")[0]
    if "\\" in wanted or not wanted.isascii() or not wanted.isprintable():
        return False
    return path == "/search" or any(path == place.path for place in PLACES) or path.startswith(_DETAILS)
