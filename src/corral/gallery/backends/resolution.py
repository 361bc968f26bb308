"""Input and results of resolving a backend for a machine. Results are stored with the rule they were made for, so that
a node that returns after a month gets the same build, not the newest one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from corral.contract.codec import Message, always
from corral.contract.hardware import DEFAULT
from corral.contract.manifest import Manifest
from corral.contract.sources import Source
from corral.gallery.backends.variants import TriedBuild


@dataclass(frozen=True, slots=True, order=True)
class Machine:
    """What choosing a build depends on. Nodes with equal values get the same build."""

    capability: str = DEFAULT
    platform: str = ""  # os/arch; empty: a LocalAI worker, which does not report it
    python: str = ""  # 3.11: the interpreter that will run wheels; empty: the same as the controller's

    @property
    def runtime(self) -> str:
        """What a lock of wheels depends on, as one key."""
        return f"{self.platform} python{self.python}"


class ResolvedBackend(Message, frozen=True):
    backend: str = always(str)  # as requested
    variant: str = always(str)  # the concrete build: names its folder and its inventory row
    alias: str = ""
    version: str = ""
    gallery_url: str = ""
    digest: str = ""  # what the inventory will show; empty: known only after fetching
    sources: tuple[Source, ...] = ()
    manifest: Manifest | None = None
    reason: str = ""  # why this build
    tried: tuple[str, ...] = ()
    note: str = ""  # for users: why it is not the build for the machine's own hardware

    @property
    def size_bytes(self) -> int:
        """Bytes that a node without any of it fetches; 0: unknown."""
        return self.sources[0].size if self.sources else 0


@dataclass(frozen=True, slots=True)
class Unresolved:
    """No build was found. `permanent`: a retry will not help until the gallery, the node or the request changes."""

    reason: str
    permanent: bool
    tried: tuple[str, ...] = ()
    nearest: tuple[str, ...] = ()


def as_texts(steps: Iterable[TriedBuild]) -> tuple[str, ...]:
    return tuple(map(str, steps))
