"""Explains whether broken streams of a model are continued (`resume_streams`), and on which nodes not. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from corral.contract.models import Definition

MAX_NAMES = 5


class Resumption(NamedTuple):
    text: str = ""  # empty: the definition does not ask for it
    is_limited: bool = False  # on some node, or on all, a stream that breaks off stays broken


def explain_resumption(definition: Definition, can_continue: Mapping[str, bool]) -> Resumption:
    """`can_continue`: by name of each node that has, or could have, the backend: whether a process there goes on with
    the beginning of an answer."""
    if not definition.resume_streams:
        return Resumption()
    cannot = sorted(name for name, can in can_continue.items() if not can)
    if not can_continue:
        return Resumption("continued on another replica, where a backend declares how it continues a text")
    backend = definition.backend
    if len(cannot) == len(can_continue):
        declares = f"no build of {backend} declares how it continues a text (`continues` in its manifest)"
        return Resumption(f"not continued, though resume_streams is set: {declares}", True)
    if not cannot:
        return Resumption("continued on another replica")
    more = f" and {len(cannot) - MAX_NAMES} more" if len(cannot) > MAX_NAMES else ""
    on = f"{', '.join(cannot[:MAX_NAMES])}{more}"
    declares = f"the build of {backend} there does not declare how it continues a text (`continues` in its manifest)"
    return Resumption(f"continued on another replica, but not from or to {on}: {declares}", True)
