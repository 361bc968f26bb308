"""What is known about the process that requests are bridged to. Pure, and free of gRPC."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any

import msgspec


@dataclass(frozen=True)
class Served:
    """One gRPC process with its model. `definition` is the model's, whole: defaults of requests come from it."""

    address: str  # host:port
    model: str  # what clients call it, and what answers say
    backend: str = ""
    token: str = field(default="", repr=False)  # empty: it asks for none
    definition: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    load: str = field(default="", repr=False)  # the ModelOptions it was loaded with, as JSON
    slots: int = 1

    @cached_property
    def identity(self) -> str:
        """What requests must name so that another model on a recycled port refuses them; empty: nobody checks."""
        return identity_of(self.load)

    @property
    def model_file(self) -> str:
        return self._loaded("ModelFile")

    @property
    def models_folder(self) -> str:
        return self._loaded("ModelPath")

    def setting(self, *keys: str) -> Any:
        """A value of the definition, `setting("template", "use_tokenizer_template")`; None when nobody said."""
        value: Any = self.definition
        for key in keys:
            value = value.get(key) if isinstance(value, Mapping) else None
        return value

    def _loaded(self, name: str) -> str:
        return _text(self.load, name)


def identity_of(load: str) -> str:
    """What a process that was loaded with this must be asked for; empty: nobody checks."""
    return _text(load, "Model")


def _text(load: str, name: str) -> str:
    told = msgspec.json.decode(load) if load else {}
    value = told.get(name)
    return value if isinstance(value, str) else ""


class Pulse(StrEnum):
    ALIVE = "alive"
    BUSY = "busy"  # it did not answer in time, or answered something else: silence is not death
    UNREACHABLE = "unreachable"
