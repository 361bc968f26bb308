"""The catalogue of models over galleries that are here in the test: `{gallery: YAML}`, besides the built-in one."""

from __future__ import annotations

from collections.abc import Mapping

from corral.controller.backends.catalogue import Catalogue
from corral.controller.files.fetches import Fetches
from corral.controller.models.galleries import ModelGalleries
from corral.controller.models.service import Models
from corral.controller.runtime.change_feed import ChangeFeed
from corral.gallery.galleries import Gallery
from corral.gallery.models.library import Fetchers, ModelLibrary
from corral.kit.clock import SystemClock
from corral.kit.errors import NotFound
from corral.store import Store


class NothingToFetch(Fetches):
    """Of models nobody loads here."""

    def __init__(self) -> None:
        pass

    async def request(self, model_id: str, *, by: str = "") -> str:
        return ""


class FakeDocuments:
    """Documents by URL."""

    def __init__(self, documents: Mapping[str, str]) -> None:
        self.documents = dict(documents)
        self.requests: list[str] = []

    async def fetch(self, url: str) -> bytes:
        self.requests.append(url)
        if url not in self.documents:
            raise NotFound(f"there is no {url}")
        return self.documents[url].encode()


def model_library(
    galleries: Mapping[str, str] | None = None, documents: Mapping[str, str] | None = None
) -> ModelLibrary:
    known = {f"https://{name}.test/index.yaml": text for name, text in (galleries or {}).items()}
    server = FakeDocuments(known | dict(documents or {}))
    wanted = [Gallery(name, f"https://{name}.test/index.yaml") for name in galleries or {}]
    return ModelLibrary(wanted, Fetchers(server.fetch, server.fetch, server.fetch), clock=SystemClock())


def models_of(
    store: Store,
    changes: ChangeFeed,
    galleries: Mapping[str, str] | None = None,
    documents: Mapping[str, str] | None = None,
    backends: Catalogue | None = None,
) -> Models:
    return Models(store, changes, ModelGalleries(store, model_library(galleries, documents)), backends)
