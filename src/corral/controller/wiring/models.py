"""Assembles the model catalogue: galleries, the model service, schedules and the watched folder."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from corral.contract.catalogue import ScheduleBody
from corral.controller.backends.catalogue import Catalogue
from corral.controller.models.folder import ModelsFolder
from corral.controller.models.galleries import BundledModels, open_model_galleries
from corral.controller.models.schedules import Schedules, read_given
from corral.controller.models.service import FileSizes, Models
from corral.controller.runtime.change_feed import ChangeFeed
from corral.controller.settings import ControllerSettings
from corral.controller.wiring.backends import gallery_options
from corral.gallery.models.library import ModelLibrary
from corral.gallery.yaml_items import read_items
from corral.kit.clock import Clock
from corral.kit.errors import Invalid
from corral.store.engine.transactions import Store


@dataclass(frozen=True)
class ModelParts:
    models: Models
    schedules: Schedules
    folder: ModelsFolder
    library: ModelLibrary

    @property
    def parts(self) -> tuple[Any, ...]:
        """Each has a name and a `run`."""
        return (self.folder,)

    def notices(self) -> list[str]:
        """Problems that a user should fix."""
        return [
            f"{name} in the models folder: {problem}"
            for name, problems in self.folder.problems.items()
            for problem in problems
        ]


@asynccontextmanager
async def open_models(
    settings: ControllerSettings,
    store: Store,
    feed: ChangeFeed,
    backends: Catalogue,
    sizes: FileSizes,
    clock: Clock,
    bundled: BundledModels | None = None,
) -> AsyncIterator[ModelParts]:
    """Raises Invalid for schedules in the settings that cannot be meant."""
    schedules = Schedules(store, feed)
    given = given_schedules(settings.models.model_scheduling, settings.models.model_scheduling_config)
    options = gallery_options(settings, settings.gallery.model_galleries)
    async with open_model_galleries(store, options, clock=clock, bundled=bundled) as galleries:
        models = Models(store, feed, galleries, backends, sizes)
        folder = ModelsFolder(
            models_folder(settings), models, store, feed, clock, interval_s=settings.models.models_folder_interval_s
        )
        await schedules.seed(given)
        yield ModelParts(models, schedules, folder, galleries.library)


def models_folder(settings: ControllerSettings) -> Path:
    """The default folder is created if it is missing; a configured one may not be mounted yet."""
    if settings.models.models_folder is not None:
        return settings.models.models_folder.expanduser()
    folder = settings.data.expanduser() / "models"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def given_schedules(text: str, file: Path | None) -> tuple[ScheduleBody, ...]:
    """Of the setting and of the file; where both name a model, the setting counts."""
    found: dict[str, ScheduleBody] = {}
    for body in (*_of_file(file), *_of_text(text)):
        found[body.model_name] = body
    return tuple(found.values())


def _of_text(text: str) -> tuple[ScheduleBody, ...]:
    if not text.strip():
        return ()
    try:
        items = msgspec.json.decode(text, type=list[dict[str, Any]])
        return read_given(items)
    except (msgspec.DecodeError, Invalid) as error:
        raise Invalid(f"model-scheduling: {error}") from error


def _of_file(file: Path | None) -> tuple[ScheduleBody, ...]:
    if file is None:
        return ()
    try:
        read = read_items(file.expanduser().read_bytes(), typed=True, single=True, exact=True)
        if read.problems:
            raise Invalid(str(read.problems[0]))
        return read_given(item.value for item in read.items)
    except (OSError, Invalid) as error:
        raise Invalid(f"model-scheduling-config: {error}") from error
