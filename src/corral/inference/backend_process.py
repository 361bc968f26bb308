"""A gRPC process and its model, as the bridge knows it; the result of a health check. Pure, without gRPC."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any

import msgspec


@dataclass(frozen=True)
class BackendProcess:
    """One gRPC process with its model. Defaults of requests come from the model's `definition`."""

    address: str  # host:port
    model: str  # the name that clients use
    backend: str = ""
    token: str = field(default="", repr=False)  # empty: the process requires none
    definition: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    load: str = field(default="", repr=False)  # the ModelOptions it was loaded with, as JSON
    slots: int = 1

    @cached_property
    def identity(self) -> str:
        """The identity in requests, so that another model on a reused port refuses them; empty: not checked."""
        return model_identity(self.load)

    @property
    def model_file(self) -> str:
        return self._loaded("ModelFile")

    @property
    def models_folder(self) -> str:
        return self._loaded("ModelPath")

    def setting(self, *keys: str) -> Any:
        """A value of the definition: `setting("template", "use_tokenizer_template")`; None if it is not set."""
        value: Any = self.definition
        for key in keys:
            value = value.get(key) if isinstance(value, Mapping) else None
        return value

    def _loaded(self, name: str) -> str:
        return _text(self.load, name)


def model_identity(load: str) -> str:
    """The identity of the model in these load options; empty: not checked."""
    return _text(load, "Model")


def _text(load: str, name: str) -> str:
    options = msgspec.json.decode(load) if load else {}
    value = options.get(name)
    return value if isinstance(value, str) else ""


class ProcessHealth(StrEnum):
    ALIVE = "alive"
    BUSY = "busy"  # no answer in time, or another answer: a busy process may be silent
    UNREACHABLE = "unreachable"
