"""What a node's inventory says about one backend. Pure (docs/reference/wire/backends.md#list).

A backend may be there under its own name, as the build a meta entry stands for, or by its alias. A LocalAI worker does
not say which build its meta rows stand for; then the build we resolved for it is looked for, and the meta row itself
counts when the worker chose another. Nor does it tell aliases: those were added when it was asked.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from corral.contract.messages.backends import NodeBackend


@dataclass(frozen=True)
class Installed:
    digest: str = ""  # empty: the worker does not tell
    installed_at: str = ""
    version: str = ""
    system: bool = False  # read-only: it can be used, not changed
    beside: tuple[str, ...] = ()  # digests of other versions that are there, too
    problem: str = ""  # why nothing of it can run there now

    @property
    def mark(self) -> str:
        """When it was installed, and its digest: what an order remembers of the state before it."""
        return f"{self.installed_at} {self.digest}".rstrip()

    def digest_before(self, mark: str) -> str | None:
        """The digest in a mark, where this was installed after the mark was made; None: it was not."""
        installed_at, _, digest = mark.partition(" ")
        return digest if installed_at != self.installed_at else None


def find_installed(rows: Sequence[NodeBackend], backend: str, variant: str = "") -> Installed | None:
    """`variant`: the concrete build we mean by `backend` on this node."""
    row = _named(rows, backend) or _by_alias(rows, backend, variant)
    if row is None:
        return None
    if not row.is_meta:
        return Installed(row.digest, row.installed_at, row.version, row.is_system, _beside(row), row.problem)
    concrete = _named(rows, row.meta_backend_for or variant)
    if concrete is not None:
        installed_at = concrete.installed_at or row.installed_at
        version = concrete.version or row.version
        digest, problem = concrete.digest or row.digest, concrete.problem
        return Installed(digest, installed_at, version, beside=_beside(concrete), problem=problem)
    if row.meta_backend_for:
        return None  # what it stands for is gone, so it stands for nothing
    return Installed(row.digest, row.installed_at, row.version)


def names_in(rows: Iterable[NodeBackend]) -> frozenset[str]:
    """Every name under which something is installed."""
    return frozenset(name for row in rows for name in (row.name, row.alias) if name)


def only_called(rows: Iterable[NodeBackend], name: str) -> frozenset[str]:
    """The builds a name may mean here, where it is nobody's own but another name for them."""
    found = [row for row in rows if name and name in (row.name, row.alias)]
    if any(row.name == name for row in found):
        return frozenset()
    return frozenset(row.name for row in found if not row.is_system and not row.is_meta)


def previous_digests(rows: Sequence[NodeBackend], backend: str) -> tuple[str, ...]:
    """Versions the node still keeps beside the current one, the newest first."""
    row = _named(rows, backend) or _by_alias(rows, backend)
    if row is not None and row.is_meta:
        row = _named(rows, row.meta_backend_for) or row
    return row.previous if row is not None else ()


def concrete_name(rows: Sequence[NodeBackend], backend: str) -> str:
    """The build's own name, where the node tells; else the name itself."""
    row = _named(rows, backend) or _by_alias(rows, backend)
    return (row.meta_backend_for or row.name) if row is not None else backend


def _beside(row: NodeBackend) -> tuple[str, ...]:
    return (*row.fetched, *row.previous)


def _named(rows: Iterable[NodeBackend], name: str) -> NodeBackend | None:
    found = [row for row in rows if row.name == name] if name else []
    return next((row for row in found if not row.is_system), found[0] if found else None)


def _by_alias(rows: Iterable[NodeBackend], alias: str, variant: str = "") -> NodeBackend | None:
    found = [row for row in rows if row.alias == alias and not row.is_system and not row.is_meta]
    return next((row for row in found if row.name == variant), found[0] if found else None)
