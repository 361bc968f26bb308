"""Pages as bytes: templates filled in, and the headers every page carries."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from litestar import Response

from corral.controller.web.assets import Assets, load_assets
from corral.controller.web.words import model_href, node_href

# No inline script or style anywhere: a name that slips through unescaped still runs nothing.
CONTENT_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
SAFE_HEADERS = {
    "Content-Security-Policy": CONTENT_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


class Pages:
    """Templates and static files, which come with the package and are the same for every request."""

    def __init__(self) -> None:
        self.assets: Assets = load_assets()
        self._templates = Environment(
            loader=PackageLoader("corral.controller.web"),
            autoescape=True,
            undefined=StrictUndefined,  # a misspelt name is an error in a test, not an empty cell
            trim_blocks=True,
            lstrip_blocks=True,
            auto_reload=False,
        )
        self._templates.globals |= {"asset": self.assets.url, "node_href": node_href, "model_href": model_href}

    def text(self, template: str, **values: Any) -> str:
        return self._templates.get_template(template).render(values)

    def page(
        self, template: str, *, status: int = 200, headers: Mapping[str, str] | None = None, **values: Any
    ) -> Response[str]:
        return self.drawn(self.text(template, **values), status=status, headers=headers)

    def drawn(self, text: str, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response[str]:
        return Response(
            text,
            status_code=status,
            media_type="text/html",
            headers={**SAFE_HEADERS, "Cache-Control": "no-store", **(headers or {})},
        )


@cache
def load_pages() -> Pages:
    """Read at first use and kept: error handlers need them too, and those are given nothing but the request."""
    return Pages()


def see_other(where: str) -> Response[bytes]:
    headers = {**SAFE_HEADERS, "Cache-Control": "no-store", "Location": where}
    return Response(b"", status_code=303, media_type="text/plain", headers=headers)


def trouble(status: int, title: str, sentence: str, *, refresh: str = "") -> Response[str]:
    """A page that says one thing. `refresh` is ours, never the request's: it leads a browser somewhere."""
    headers = {"Refresh": refresh} if refresh else {}
    return load_pages().page("trouble.html", status=status, headers=headers, title=title, sentence=sentence)
