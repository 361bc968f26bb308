"""What resolving a backend for a machine comes to. Records only; they are stored with the rule they were made for, so
that a node that comes back in a month gets what was decided, not what is newest then."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from corral.contract.codec import Message, always
from corral.contract.manifest import Manifest
from corral.contract.sources import Source
from corral.gallery.backends.variants import Step


class Resolved(Message, frozen=True):
    backend: str = always(str)  # as it was asked for
    variant: str = always(str)  # the concrete build: its folder, its row in the inventory
    alias: str = ""
    version: str = ""
    gallery_url: str = ""
    digest: str = ""  # what the inventory will show; empty where only the fetched content can tell
    sources: tuple[Source, ...] = ()
    manifest: Manifest | None = None
    reason: str = ""  # why this build
    tried: tuple[str, ...] = ()
    note: str = ""  # for the operation's row and the plan: why it is not the machine's own kind of build

    @property
    def size_bytes(self) -> int:
        """What a node without any of it fetches; 0: unknown."""
        return self.sources[0].size if self.sources else 0


@dataclass(frozen=True, slots=True)
class Refused:
    """`permanent`: time alone will not cure it; gallery, node or wish must change."""

    reason: str
    permanent: bool
    tried: tuple[str, ...] = ()
    nearest: tuple[str, ...] = ()


def as_texts(steps: Iterable[Step]) -> tuple[str, ...]:
    return tuple(map(str, steps))
