"""Finds installed backends with a newer build, and nodes whose build differs from the others' (drift)
(docs/reference/wire/gallery.md#upgrades). Pure: the caller has looked up the current digests of the sources.

Three differences from LocalAI's rules. A row is compared with the gallery it came from, and a row installed from a
user's own URI only with an entry of the same URI. A meta row has no content, so it is never outdated. And locked wheels
differ by platform and Python, so only nodes with the same runtime are compared with each other.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from corral.contract.messages.backends import NodeBackend, NodeDrift, UpgradeInfo
from corral.gallery.backends.catalogue import BackendCatalogue
from corral.gallery.backends.entries import DEVELOPMENT_SUFFIX, BackendEntry
from corral.gallery.backends.resolution import Machine

PYPI_SCHEME = "pypi://"


@dataclass(frozen=True, slots=True)
class AvailableBuild:
    """The current build of a source. `version`: only if the source has versions of its own (wheels)."""

    digest: str = ""
    version: str = ""


_NOTHING = AvailableBuild()
# (entry id, "" or a machine's runtime) → the current build. A failed lookup is absent, and so not compared.
Digests = Mapping[tuple[str, str], AvailableBuild]


@dataclass(frozen=True, slots=True)
class NodeInventory:
    node_id: str
    node_name: str
    machine: Machine
    backends: tuple[NodeBackend, ...]


@dataclass(frozen=True, slots=True)
class _InstalledRow:
    node: NodeInventory
    backend: NodeBackend

    @property
    def build(self) -> tuple[str, str]:
        return self.backend.version, self.backend.digest


def upgrades(
    installed_by_node: Sequence[NodeInventory],
    gallery: BackendCatalogue,
    digests: Digests,
    *,
    development_suffix: str = DEVELOPMENT_SUFFIX,
) -> dict[str, UpgradeInfo]:
    """Upgrades by name of the concrete build; a backend that is up to date on every node is left out."""
    found: dict[str, list[UpgradeInfo]] = defaultdict(list)
    for entry, rows in _rows_by_entry(installed_by_node, gallery, development_suffix):
        groups: dict[str, list[_InstalledRow]] = defaultdict(list)
        for row in rows:
            groups[digest_key(entry, row.node.machine)].append(row)
        for key, group in sorted(groups.items()):
            if (info := _compare(entry, group, digests.get((entry.id, key), _NOTHING))) is not None:
                found[entry.name].append(info)
    return {name: _merge(infos) for name, infos in sorted(found.items())}


def digests_to_look_up(
    installed_by_node: Sequence[NodeInventory],
    gallery: BackendCatalogue,
    *,
    development_suffix: str = DEVELOPMENT_SUFFIX,
) -> dict[tuple[str, str], tuple[BackendEntry, Machine]]:
    """The lookups that `upgrades` needs, by the key of `digests`."""
    needed: dict[tuple[str, str], tuple[BackendEntry, Machine]] = {}
    for entry, rows in _rows_by_entry(installed_by_node, gallery, development_suffix):
        if entry.version:  # versions decide; no lookup is needed
            continue
        for row in rows:
            needed.setdefault((entry.id, digest_key(entry, row.node.machine)), (entry, row.node.machine))
    return needed


def digest_key(entry: BackendEntry, machine: Machine) -> str:
    """Key of the machines that share one digest of this build: all machines, except for wheels."""
    return machine.runtime if entry.uri.startswith(PYPI_SCHEME) else ""


def is_newer(entry: BackendEntry, version: str, digest: str, available_digest: str) -> bool:
    """Whether the gallery has another build than the installed one. Versions decide if the gallery has one."""
    if entry.version:
        return version != entry.version
    return bool(available_digest) and digest != available_digest


def is_proven(info: UpgradeInfo) -> bool:
    """Whether the nodes' reports prove a difference. A node that reports no digest is listed, but proves nothing: the
    digest would still be missing after an upgrade."""
    majority = (info.installed_version, info.installed_digest)
    available = (info.available_version, info.available_digest)
    others = [(drift.version, drift.digest) for drift in info.node_drift]
    return any(_differ(build, available) for build in (majority, *others)) or any(
        _differ(build, majority) for build in others
    )


def _differ(one: tuple[str, str], other: tuple[str, str]) -> bool:
    """Versions decide if both are known, then digests; otherwise there is no difference."""
    (version, digest), (other_version, other_digest) = one, other
    if version and other_version and version != other_version:
        return True
    if digest and other_digest:
        return digest != other_digest
    # A build that is older than the gallery's versions has a digest and no version.
    return bool(other_version) and not version and bool(digest)


def _rows_by_entry(
    nodes: Iterable[NodeInventory], gallery: BackendCatalogue, suffix: str
) -> list[tuple[BackendEntry, list[_InstalledRow]]]:
    found: dict[str, tuple[BackendEntry, list[_InstalledRow]]] = {}
    entries: dict[tuple[str, str, str], BackendEntry | None] = {}  # a cache: many nodes have the same rows
    for node in nodes:
        names = {backend.name for backend in node.backends}
        for backend in node.backends:
            # A node with both the release and the development build uses the latter.
            if backend.is_system or backend.is_meta or f"{backend.name}-{suffix}" in names:
                continue
            key = backend.name, backend.gallery_url, backend.uri
            if key not in entries:
                entries[key] = _entry_of(backend, gallery)
            if (entry := entries[key]) is not None:
                found.setdefault(entry.id, (entry, []))[1].append(_InstalledRow(node, backend))
    return list(found.values())


def _entry_of(backend: NodeBackend, gallery: BackendCatalogue) -> BackendEntry | None:
    for index in gallery.indexes:
        if backend.gallery_url and backend.gallery_url == index.gallery.url:
            found = gallery.find(f"{index.gallery.name}@{backend.name}")
            break
    else:
        found = gallery.find(backend.name)
    # A match by alias does not count: an installed row has the name of a build.
    if not isinstance(found, BackendEntry) or found.is_meta:
        return None
    own = bool(backend.uri) and not backend.gallery_url and backend.uri not in (found.uri, *found.mirrors)
    return None if own else found


def _compare(entry: BackendEntry, rows: Sequence[_InstalledRow], available: AvailableBuild) -> UpgradeInfo | None:
    available_version = entry.version or available.version
    version, digest = _majority(rows, (available_version, available.digest))
    drift = tuple(
        NodeDrift(row.node.node_id, row.node.node_name, *row.build)
        for row in sorted(rows, key=lambda row: row.node.node_name)
        if row.build != (version, digest)
    )
    if not drift and not is_newer(entry, version, digest, available.digest):
        return None
    return UpgradeInfo(entry.name, version, available_version, digest, available.digest, drift)


def _majority(rows: Sequence[_InstalledRow], available: tuple[str, str]) -> tuple[str, str]:
    """The build of most nodes. In a tie the gallery's build wins, so that the other nodes are listed as drift."""
    counted = Counter(row.build for row in rows)
    return max(counted, key=lambda build: (counted[build], build == available, build[1] == available[1], build))


def _merge(found: Sequence[UpgradeInfo]) -> UpgradeInfo:
    first = next(filter(is_proven, found), found[0])
    drift = tuple(each for info in found for each in info.node_drift)
    return UpgradeInfo(
        first.backend_name,
        first.installed_version,
        first.available_version,
        first.installed_digest,
        first.available_digest,
        drift,
    )
