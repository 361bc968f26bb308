"""Where the pages of nodes and models are, and the row of a backend. Pure; the scripts encode names in the same way."""

from __future__ import annotations

from urllib.parse import quote

_AS_BROWSERS_DO = "!'()*"  # what `encodeURIComponent` leaves alone beside letters, digits and -_.~


def node_href(name: str) -> str:
    return f"/nodes/{quote(name, safe=_AS_BROWSERS_DO)}"


def model_href(name: str) -> str:
    """A slash in the name stays: it reads better, and the route takes the rest of the path."""
    return f"/models/{quote(name, safe='/' + _AS_BROWSERS_DO)}"


def backend_href(name: str) -> str:
    return f"/fleet/backends#backend-{quote(name, safe=_AS_BROWSERS_DO)}"
