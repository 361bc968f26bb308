"""Which installed backends could be newer, and which nodes differ from the others
(docs/reference/wire/gallery.md#upgrades). Pure: what the sources' digests are today was looked up before.

Three differences from the contract's rules, each where those go wrong. A row is compared with the gallery it came from,
and one installed from a URI of somebody's own only with an entry of the same URI. A meta row has no content, so it can
neither be old nor differ. And locked wheels differ by platform and Python, so such nodes are compared among themselves.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from corral.contract.messages.backends import NodeBackend, NodeDrift, UpgradeInfo
from corral.gallery.backends.catalogue import Catalogue
from corral.gallery.backends.entries import DEVELOPMENT_SUFFIX, BackendEntry
from corral.gallery.backends.machine import Machine

PYPI_SCHEME = "pypi://"


@dataclass(frozen=True, slots=True)
class Available:
    """What the source has today. `version` only where it has versions of its own (wheels)."""

    digest: str = ""
    version: str = ""


_NOTHING = Available()
# (entry id, "" or a machine's runtime) → what is there. What could not be looked up is absent, and so not compared.
Digests = Mapping[tuple[str, str], Available]


@dataclass(frozen=True, slots=True)
class NodeInventory:
    node_id: str
    node_name: str
    machine: Machine
    backends: tuple[NodeBackend, ...]


@dataclass(frozen=True, slots=True)
class _Row:
    node: NodeInventory
    backend: NodeBackend

    @property
    def build(self) -> tuple[str, str]:
        return self.backend.version, self.backend.digest


def upgrades(
    installed_by_node: Sequence[NodeInventory],
    gallery: Catalogue,
    digests: Digests,
    *,
    development_suffix: str = DEVELOPMENT_SUFFIX,
) -> dict[str, UpgradeInfo]:
    """By name of the concrete build; a backend that is as it should be everywhere is not in it."""
    told: dict[str, list[UpgradeInfo]] = defaultdict(list)
    for entry, rows in _rows_by_entry(installed_by_node, gallery, development_suffix):
        groups: dict[str, list[_Row]] = defaultdict(list)
        for row in rows:
            groups[digest_key(entry, row.node.machine)].append(row)
        for key, group in sorted(groups.items()):
            if (info := _compare(entry, group, digests.get((entry.id, key), _NOTHING))) is not None:
                told[entry.name].append(info)
    return {name: _as_one(infos) for name, infos in sorted(told.items())}


def digests_to_look_up(
    installed_by_node: Sequence[NodeInventory],
    gallery: Catalogue,
    *,
    development_suffix: str = DEVELOPMENT_SUFFIX,
) -> dict[tuple[str, str], tuple[BackendEntry, Machine]]:
    """What `upgrades` needs to know of the world, by the key it is to be told under."""
    needed: dict[tuple[str, str], tuple[BackendEntry, Machine]] = {}
    for entry, rows in _rows_by_entry(installed_by_node, gallery, development_suffix):
        if entry.version:  # versions decide; nobody asks the registry
            continue
        for row in rows:
            needed.setdefault((entry.id, digest_key(entry, row.node.machine)), (entry, row.node.machine))
    return needed


def digest_key(entry: BackendEntry, machine: Machine) -> str:
    """Which machines have the same digest of this build: all, except for wheels."""
    return machine.runtime if entry.uri.startswith(PYPI_SCHEME) else ""


def is_newer(entry: BackendEntry, version: str, digest: str, available_digest: str) -> bool:
    """Whether the gallery has something else than what is installed. Versions decide where the gallery has one."""
    if entry.version:
        return version != entry.version
    return bool(available_digest) and digest != available_digest


def is_proven(info: UpgradeInfo) -> bool:
    """Whether what nodes report shows a difference. A digest that a node does not report is listed as a difference, but
    it proves none: it would still be missing after every upgrade."""
    majority = (info.installed_version, info.installed_digest)
    available = (info.available_version, info.available_digest)
    others = [(drift.version, drift.digest) for drift in info.node_drift]
    return any(_differ(build, available) for build in (majority, *others)) or any(
        _differ(build, majority) for build in others
    )


def _differ(one: tuple[str, str], other: tuple[str, str]) -> bool:
    """Versions decide where both are known, then digests; what neither side can tell is no difference."""
    (version, digest), (other_version, other_digest) = one, other
    if version and other_version and version != other_version:
        return True
    if digest and other_digest:
        return digest != other_digest
    # A build from before its gallery had versions has a digest and no version.
    return bool(other_version) and not version and bool(digest)


def _rows_by_entry(
    nodes: Iterable[NodeInventory], gallery: Catalogue, suffix: str
) -> list[tuple[BackendEntry, list[_Row]]]:
    found: dict[str, tuple[BackendEntry, list[_Row]]] = {}
    entries: dict[tuple[str, str, str], BackendEntry | None] = {}  # many nodes have the same, and looking takes a while
    for node in nodes:
        names = {backend.name for backend in node.backends}
        for backend in node.backends:
            # Who has the development build beside the release wants that one.
            if backend.is_system or backend.is_meta or f"{backend.name}-{suffix}" in names:
                continue
            key = backend.name, backend.gallery_url, backend.uri
            if key not in entries:
                entries[key] = _entry_of(backend, gallery)
            if (entry := entries[key]) is not None:
                found.setdefault(entry.id, (entry, []))[1].append(_Row(node, backend))
    return list(found.values())


def _entry_of(backend: NodeBackend, gallery: Catalogue) -> BackendEntry | None:
    for index in gallery.indexes:
        if backend.gallery_url and backend.gallery_url == index.gallery.url:
            found = gallery.find(f"{index.gallery.name}@{backend.name}")
            break
    else:
        found = gallery.find(backend.name)
    # By alias does not count: an installed row has the name of a build.
    if not isinstance(found, BackendEntry) or found.is_meta:
        return None
    own = bool(backend.uri) and not backend.gallery_url and backend.uri not in (found.uri, *found.mirrors)
    return None if own else found


def _compare(entry: BackendEntry, rows: Sequence[_Row], available: Available) -> UpgradeInfo | None:
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


def _majority(rows: Sequence[_Row], available: tuple[str, str]) -> tuple[str, str]:
    """What most nodes have. A tie goes to what the gallery has, so that the others are the ones to move."""
    counted = Counter(row.build for row in rows)
    return max(counted, key=lambda build: (counted[build], build == available, build[1] == available[1], build))


def _as_one(told: Sequence[UpgradeInfo]) -> UpgradeInfo:
    first = next(filter(is_proven, told), told[0])
    drift = tuple(each for info in told for each in info.node_drift)
    return UpgradeInfo(
        first.backend_name,
        first.installed_version,
        first.available_version,
        first.installed_digest,
        first.available_digest,
        drift,
    )
