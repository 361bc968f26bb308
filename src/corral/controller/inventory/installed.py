"""Finds one backend in a node's inventory. Pure (docs/reference/wire/backends.md#list).

A backend may be installed under its own name, as the build of a meta entry, or by its alias. A LocalAI worker does not
report which build its meta rows stand for: then the resolved build is looked up, and the meta row itself counts if the
worker chose another. Nor does it report aliases: the inventory collector adds them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from corral.contract.messages.backends import NodeBackend


@dataclass(frozen=True)
class Installed:
    digest: str = ""  # empty: the worker does not report it
    installed_at: str = ""
    version: str = ""
    system: bool = False  # read-only: it can be used, but not changed
    beside: tuple[str, ...] = ()  # digests of other stored versions
    problem: str = ""  # why it cannot run on the node now

    @property
    def mark(self) -> str:
        """The install time and the digest: an order stores the mark of the state before it."""
        return f"{self.installed_at} {self.digest}".rstrip()

    def digest_before(self, mark: str) -> str | None:
        """The digest in the mark, if this was installed after the mark was made; else None."""
        installed_at, _, digest = mark.partition(" ")
        return digest if installed_at != self.installed_at else None


def find_installed(rows: Sequence[NodeBackend], backend: str, variant: str = "") -> Installed | None:
    """`variant`: the name of the resolved build of `backend` for this node."""
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
        return None  # its build is not installed
    return Installed(row.digest, row.installed_at, row.version)


def names_in(rows: Iterable[NodeBackend]) -> frozenset[str]:
    """All names and aliases of installed backends."""
    return frozenset(name for row in rows for name in (row.name, row.alias) if name)


def only_called(rows: Iterable[NodeBackend], name: str) -> frozenset[str]:
    """The builds that have the name only as an alias; empty if a backend has it as its own name."""
    found = [row for row in rows if name and name in (row.name, row.alias)]
    if any(row.name == name for row in found):
        return frozenset()
    return frozenset(row.name for row in found if not row.is_system and not row.is_meta)


def previous_digests(rows: Sequence[NodeBackend], backend: str) -> tuple[str, ...]:
    """The digests of earlier versions that the node keeps, the newest first."""
    row = _named(rows, backend) or _by_alias(rows, backend)
    if row is not None and row.is_meta:
        row = _named(rows, row.meta_backend_for) or row
    return row.previous if row is not None else ()


def concrete_name(rows: Sequence[NodeBackend], backend: str) -> str:
    """The name of the build, if the node reports it; else the given name."""
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
