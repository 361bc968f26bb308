"""Names of processes: `<model, or backend when there is none>#<replica>`
(docs/reference/wire/processes.md#process-key). Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple, Protocol, TypeVar


class Slot(NamedTuple):
    """The parts of a process key."""

    name: str
    replica: int


def process_key(model: str, backend: str, replica: int) -> str:
    return f"{model or backend}#{replica}"


def parse_key(key: str) -> Slot | None:
    """Split at the last `#`: a model's own name may contain one. None for a name that is no key."""
    name, hash_sign, digits = key.rpartition("#")
    if not (name and hash_sign and digits.isascii() and digits.isdigit()):
        return None
    return Slot(name, int(digits))


class Named(Protocol):
    @property
    def key(self) -> str: ...

    @property
    def backend(self) -> str: ...


P = TypeVar("P", bound=Named)


def choose_by_name(processes: Iterable[P], name: str, backends: Collection[str] = ()) -> list[P]:
    """The processes that a name in `backend.stop` selects. The name is ambiguous by design: every process of a backend
    (`backends` are the names one install is known by), the process with exactly this key, and every replica of a model
    with this name. A name with a `#` is a key. Unlike the contract's prefix, `m` does not mean the model `m#1`."""
    known = {name, *backends}
    model = "" if "#" in name else name
    return [
        process
        for process in processes
        if process.backend in known or process.key == name or (model and _model_of(process.key) == model)
    ]


def _model_of(key: str) -> str:
    slot = parse_key(key)
    return slot.name if slot is not None else ""
